"""The calls: each reads a request, checks it, has it computed and writes the answer."""
