"""Calls of `flashpoint.jax`, and the functions whose results they must equal."""

import jax
import jax.numpy as jnp
import numpy as np

import flashpoint


class Counted(flashpoint.Client):
    """A client that records its calls in `asked`: "o" for `attention`, the requested gradients for `attention_grad`."""

    asked = ()

    def attention(self, q, k, v, **keywords):
        self.asked += ("o",)
        return super().attention(q, k, v, **keywords)

    def attention_grad(self, do, q, k, v, **keywords):
        self.asked += (keywords["grads"],)
        return super().attention_grad(do, q, k, v, **keywords)


def tensors(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def same(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


def derived(function):
    """Return a function of (do, *inputs), which returns function(*inputs) and the gradient of each input for do."""

    def both(do, *inputs):
        value, back = jax.vjp(function, *inputs)
        return value, *back(do)

    return both
