"""Prepare launches on the host: choose tiles, make lists of programs and tables, and call kernels."""
