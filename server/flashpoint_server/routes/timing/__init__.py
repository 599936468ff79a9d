"""/benchmark: benchmarks that run between other requests, their state and their plots."""
