"""Derivatives of served calls for torch and JAX: autograd and vmap."""
