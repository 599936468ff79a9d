"""KV caches: the store and its chunks, attention over them, and the other calls on them."""
