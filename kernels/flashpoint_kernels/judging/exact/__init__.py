"""Compute exact answers, the error bounds of each element, and the positions of elements that exceed them."""
