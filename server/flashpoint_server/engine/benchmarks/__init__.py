"""Benchmarks and verifications, beside the requests of an engine or without a server."""
