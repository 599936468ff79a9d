"""State that an engine stores for callers: the ledger of caches and saved forwards, and tensors in shared memory."""
