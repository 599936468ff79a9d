"""Tensors that an engine stores for callers: the ledger, saved forwards and shared memory."""
