"""The routes. Each reads a request, checks it, lets an engine compute it, and writes the answer."""
