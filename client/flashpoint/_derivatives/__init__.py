"""Implement autograd (torch) and vmap (torch and JAX) for calls that a server computes."""
