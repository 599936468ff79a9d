"""Settings, the file of keys, and certificates."""
