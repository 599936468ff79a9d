"""The host's side of a launch: tiles, lists of programs, tables, and the calls of kernels."""
