"""/caches and /saved: tensors that the server stores for callers."""
