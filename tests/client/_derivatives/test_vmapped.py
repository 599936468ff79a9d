"""`jax.vmap` of `flashpoint.jax.attention` sends one request if the inputs allow; results equal separate requests."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from flashpoint.jax import attention
from tests.support.jax_calls import derived, same, tensors

N, S, T, D = 3, 5, 7, 8
Q, K, V = (2, 4, S, D), (2, 2, T, D), (2, 2, T, 6)  # layout bhsd
O = (2, 4, S, 6)  # noqa: E741
SEEN = np.tri(S, T, 2).astype(bool)
LENGTHS = np.array([[1, 7], [3, 3], [0, 5]])
RAGGED = (12, 4, D), (12, 4, D), (9, 2, D), (9, 2, D)
STARTING = {"layout": "thd", "cu_seqlens_q": [0, 3, 12], "cu_seqlens_k": [0, 4, 9]}
STARTS = np.array([[0, 3, 12], [0, 0, 12], [0, 5, 12]])

# name: (shapes of do, q, k, v and perhaps one more input; the mapped axis of each, None if it is not mapped; options;
# the number of requests for each direction). In the options, "extra" is the name of the additional input, and "mapped"
# has the options that differ between examples, as arrays whose axis 0 is mapped.
CASES = {
    "all": ((O, Q, K, V), (0, 0, 0, 0), {}, 1),
    "other axes, and one in common": ((O, Q, K, V), (0, 2, None, 4), {"causal": True}, 1),
    "no keys": ((O, Q, (2, 2, 0, D), (2, 2, 0, 6)), (0, 0, 0, 0), {}, 1),
    "one head": (((S, 6), (S, D), (T, D), (T, 6)), (0, 0, 0, None), {"window": (2, 1)}, 1),
    "one head, and a batch": (((2, S, 6), (2, S, D), (2, T, D), (2, T, 6)), (0, 0, 0, 0), {"layout": "bshd"}, 1),
    "rows before heads": (((2, S, 4, D), (2, S, 4, D), (2, T, 4, D), (2, T, 4, D)), (0,) * 4, {"layout": "bshd"}, 1),
    "a bias": ((O, Q, K, V, (4, 1, T)), (0, 0, 0, 0, 0), {"extra": "attn_mask"}, 1),
    "a bias in common": ((O, Q, K, V, (S, T)), (0, 0, 0, 0, None), {"extra": "attn_mask"}, 1),
    "a mask in common": ((O, Q, K, V), (0, 0, 0, 0), {"attn_mask": SEEN}, 1),
    "slopes": ((O, Q, K, V), (0, 0, 0, 0), {"mapped": {"alibi_slopes": np.arange(12.0).reshape(N, 4) / 8}}, 1),
    "slopes in common": ((O, Q, K, V), (0, 0, 0, 0), {"alibi_slopes": np.arange(8.0).reshape(2, 4)}, 1),
    "lengths": ((O, Q, K, V), (0, 0, 0, 0), {"mapped": {"kv_lengths": LENGTHS}}, 1),
    "offsets": ((O, Q, K, V), (0,) * 4, {"mapped": {"offset": np.arange(2 * N).reshape(N, 2) - 3}, "causal": True}, 1),
    "offsets, one each": ((O, Q, K, V), (0,) * 4, {"mapped": {"offset": np.arange(N)}, "window": (2, 1)}, 1),
    "offset in common": ((O, Q, K, V), (0,) * 4, {"offset": -2, "causal": True}, 1),
    "sinks": ((O, Q, K, V, (4,)), (0, 0, 0, 0, 0), {"extra": "sinks", "q_lengths": [5, 2]}, 1),
    "sinks in common": ((O, Q, K, V, (4,)), (0, 0, 0, 0, None), {"extra": "sinks", "attn_mask": SEEN}, 1),
    "sinks and slopes": ((O, Q, K, V, (4,)), (0,) * 5, {"extra": "sinks", "alibi_slopes": np.arange(4.0)}, 1),
    "ragged": (RAGGED, (0,) * 4, {"layout": "thd", "mapped": {"cu_seqlens_q": STARTS}, "cu_seqlens_k": [0, 4, 9]}, 1),
    "ragged, with sinks": ((*RAGGED, (4,)), (0,) * 5, {"extra": "sinks", **STARTING}, 1),
    "sinks and lengths": ((O, Q, K, V, (4,)), (0,) * 5, {"extra": "sinks", "mapped": {"kv_lengths": LENGTHS}}, N),
    "dropout": ((O, Q, K, V), (0,) * 4, {"dropout_p": 0.5, "mapped": {"dropout_seed": np.arange(N)}}, N),
}  # fmt: skip


def mapped_shape(shape, axis):
    return shape if axis is None else (*shape[:axis], N, *shape[axis:])


# `make test` runs only these cases: one for each method of merging the mapped values of an input (q, k, v, a mask,
# slopes, lengths or sinks) into one request, and cases that cannot be merged.
FAST = {
    "other axes, and one in common", "one head", "a bias", "a mask in common", "slopes", "lengths", "offsets",
    "sinks in common", "ragged", "ragged, with sinks", "sinks and lengths", "dropout",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_it_is_what_one_after_another_is(jax_client, case):
    shapes, axes, options, requests = CASES[case]
    options = dict(options)
    extra, more = options.pop("extra", None), options.pop("mapped", {})
    inputs = tensors(*map(mapped_shape, shapes, axes))

    def both(more, do, *inputs):
        def call(q, k, v, *rest):
            return attention(q, k, v, client=jax_client, **options, **more, **({extra: rest[0]} if extra else {}))

        return derived(call)(do, *inputs)

    actual = jax.block_until_ready(jax.jit(jax.vmap(both, (0, *axes)))(more, *inputs))
    assert len(jax_client.asked) == 2 * requests
    rows = []
    for n in range(N):
        one = [t if axis is None else np.take(np.asarray(t), n, axis) for t, axis in zip(inputs, axes, strict=True)]
        rows.append(both({name: t[n] for name, t in more.items()}, *one))
    same(actual, jax.tree.map(lambda *t: np.stack(t), *rows))


def test_maps_within_maps_are_one_request(jax_client):
    q, k, v = tensors((2, 3, S, D), (3, T, D), (2, T, 6))

    def one(q, k, v):
        return attention(q, k, v, client=jax_client, return_lse=True)

    actual = jax.block_until_ready(jax.vmap(jax.vmap(one, (0, 0, None)), (0, None, 0))(q, k, v))
    assert jax_client.asked == ("o",)
    rows = [[one(q[i, j], k[j], v[i]) for j in range(3)] for i in range(2)]
    same(actual, jax.tree.map(lambda *t: np.stack(t).reshape(2, 3, *t[0].shape), *[o for row in rows for o in row]))


def test_gradients_of_a_loss_over_a_map(jax_client):
    """An input that is not mapped gets the sum of the examples' gradients; one request computes all gradients."""
    q, k, v, sinks = tensors((N, *Q), (N, *K), V, (4,))

    def loss(each):
        def one(q, k, v, sinks):
            return (attention(q, k, v, client=jax_client, sinks=sinks) ** 2).sum()

        return lambda *x: each(one)(*x).sum()

    every = (0, 1, 2, 3)
    mapped = loss(lambda one: jax.vmap(one, (0, 0, None, None)))
    actual = jax.block_until_ready(jax.jit(jax.grad(mapped, every))(q, k, v, sinks))
    assert len(jax_client.asked) == 2
    summed = loss(lambda one: lambda q, k, v, sinks: sum(one(a, b, v, sinks) for a, b in zip(q, k, strict=True)))
    expected = jax.jit(jax.grad(summed, every))(q, k, v, sinks)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_ragged_sequences_with_a_gap_are_refused(jax_client):
    q, k, v = tensors(*[(N, 12, 1, D)] * 3)

    def ragged(q, k, v, starts):
        return attention(q, k, v, client=jax_client, layout="thd", cu_seqlens_q=starts, cu_seqlens_k=starts)

    starts = jnp.asarray(STARTS).at[1, 2].set(11)  # leaves out row 11, which merging with the next example would hide
    with pytest.raises(RuntimeError, match="cu_seqlens_q"):
        jax.vmap(ragged)(q, k, v, starts)
