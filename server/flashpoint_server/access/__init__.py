"""Access control: API keys, their limits, and the limits of the whole service."""
