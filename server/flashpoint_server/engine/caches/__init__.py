"""KV caches: the store and its chunks, attention over them, and what else is asked of them."""
