"""Between the processes: shared memory, messages, and the engines as an HTTP process sees them."""
