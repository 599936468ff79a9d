"""Words for people: docstrings of calls, and suggestions for unknown names."""
