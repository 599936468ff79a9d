"""The parts of `make gpu`: see benchmarks/gpu.py, which runs them, and docs/gpu-day.md."""
