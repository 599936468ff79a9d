"""/caches and /saved: tensors that the server holds for callers."""
