"""Tensors that an engine holds for callers: the ledger, saved forwards and shared memory."""
