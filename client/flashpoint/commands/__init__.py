"""The commands that ask and show: `flashpoint verify`, `benchmark` and `info`. They need the extra `cli`."""
