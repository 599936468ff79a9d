"""Calls of the service: how each request is made, and how its answer is read. No I/O."""
