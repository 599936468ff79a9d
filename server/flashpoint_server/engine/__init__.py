"""The engine process: loop, scheduler and executor for one device, and benchmarks that run beside the requests."""
