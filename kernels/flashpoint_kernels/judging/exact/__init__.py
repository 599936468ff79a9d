"""Exact answers, the bounds of each element, and the places of elements beyond them."""
