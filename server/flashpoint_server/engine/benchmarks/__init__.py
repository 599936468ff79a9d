"""Run benchmarks and verifications, on an engine that also serves requests, or without a server."""
