"""The engine's process: a loop, a scheduler and an executor on one device, and benchmarks beside the traffic."""
