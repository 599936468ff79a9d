"""The engine's process: its queue, its threads, its device, and benchmarks beside the traffic."""
