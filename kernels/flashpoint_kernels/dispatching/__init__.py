"""The choice of a backend for a problem, and the measurements behind it."""
