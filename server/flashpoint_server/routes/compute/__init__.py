"""POST /attention and POST /attention/grad, including calls with KV caches and saved forwards."""
