"""Generate text for users: docstrings of calls, and suggestions for unknown names."""
