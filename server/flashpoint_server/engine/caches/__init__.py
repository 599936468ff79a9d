"""Store KV caches in chunks of memory, and execute attention and other calls on caches."""
