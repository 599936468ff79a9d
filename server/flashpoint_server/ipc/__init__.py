"""Communication between processes: shared memory, messages, and the HTTP process's view of the engines."""
