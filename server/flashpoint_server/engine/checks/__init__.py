"""The problems that an engine computes on every kernel before it serves, with exact answers."""
