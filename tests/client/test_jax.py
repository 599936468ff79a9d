"""`flashpoint.jax.attention` gets values and derivatives from a real server that equal JAX's attention in float64."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import flashpoint
from flashpoint.jax import attention
from tests.support.jax_calls import derived, same, tensors

# The largest allowed error, relative to the largest number: the rounding of sums, and one rounding to the dtype.
BOUNDS = {"float64": 1e-14, "float32": 4e-6, "float16": 2**-9, "bfloat16": 2**-6}


def close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        bound = BOUNDS[one.dtype.name]
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= bound * np.abs(other).max()


def exact(function, *arguments):
    """Return the value and the gradients of `function` in float64, by JAX's differentiation. arguments: do, *inputs."""
    with jax.enable_x64(True):
        return jax.jit(derived(function))(*(np.asarray(a, np.float64) for a in arguments))


DO, *QKV = (2, 13, 4, 8), (2, 13, 4, 8), (2, 17, 2, 8), (2, 17, 2, 8)  # layout bshd; two heads share one key head
SEEN = np.tri(13, 17, 2, bool) & (np.arange(17) % 5 != 1)  # each query sees the first key


def eager(function):
    return function


# name: (options of flashpoint.jax.attention, the same options for jax.nn.dot_product_attention).
CASES = {
    "none": ({}, {}),
    "window": ({"window": (4, 2), "causal_alignment": "top_left"}, {"local_window_size": (4, 2)}),
    "the others": (
        {"scale": 0.3, "causal": True, "causal_alignment": "top_left", "kv_lengths": [9, 17], "attn_mask": SEEN},
        {
            "scale": 0.3,
            "is_causal": True,
            "key_value_seq_lengths": np.array([9, 17], np.int32),
            "mask": SEEN[None, None],
        },
    ),
}


@pytest.mark.parametrize(
    ("case", "wrap"),
    [
        pytest.param("none", eager, id="none, eager"),
        pytest.param("window", jax.jit, id="window, jit"),
        pytest.param("the others", jax.jit, id="the others, jit"),
        pytest.param("none", jax.jit, id="none, jit", marks=pytest.mark.slow),
        pytest.param("window", eager, id="window, eager", marks=pytest.mark.slow),
        pytest.param("the others", eager, id="the others, eager", marks=pytest.mark.slow),
    ],
)
def test_value_and_gradients_are_those_of_jax(jax_client, case, wrap):
    served, own = CASES[case]
    given = tensors(DO, *QKV)
    actual = wrap(derived(lambda *x: attention(*x, client=jax_client, layout="bshd", **served)))(*given)
    close(actual, exact(lambda *x: jax.nn.dot_product_attention(*x, **own), *given))
    assert jax_client.asked == ("o", ("dk", "dq", "dv"))


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_types_have_half_gradients(jax_client, dtype):
    given = tensors(DO, *QKV, dtype=dtype)
    actual = jax.jit(derived(lambda *x: attention(*x, client=jax_client, layout="bshd")))(*given)
    assert {t.dtype.name for t in actual} == {dtype}
    close(actual, exact(jax.nn.dot_product_attention, *given))


def test_gradients_of_a_mask_and_through_grad_and_jit(jax_client):
    def loss(call, q, k, v, bias):
        return (call(q, k, v, bias) ** 2).mean()

    def served(q, k, v, bias):
        return attention(q, k, v, client=jax_client, attn_mask=bias, layout="bshd")

    def own(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias)

    inputs = tensors(*QKV, (1, 4, 13, 17))
    every = (1, 2, 3, 4)
    actual = jax.jit(jax.value_and_grad(loss, every), static_argnums=0)(served, *inputs)
    with jax.enable_x64(True):
        graded = jax.jit(jax.value_and_grad(loss, every), static_argnums=0)
        expected = graded(own, *(np.asarray(t, np.float64) for t in inputs))
    close(actual, expected)
    close(jax.grad(loss, 4)(served, *inputs), expected[1][3])
    assert jax_client.asked[-1] == ("dattn_mask",)  # the request's `grads` has only the gradient that is needed


def dense(q, k, v, sinks):
    """Return (o, lse) by the definition, in layout bhsd. Each head's sink is an extra logit in the denominator."""
    s = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
    return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(s)[..., :-1], v), jax.nn.logsumexp(s, -1)


def test_gradients_of_sinks_and_through_lse(jax_client):
    inputs = tensors((2, 3, 9, 8), (2, 3, 11, 8), (2, 3, 11, 5), (3,))
    do, dlse = tensors((2, 3, 9, 5), (2, 3, 9), seed=1)

    def served(q, k, v, sinks):
        return attention(q, k, v, client=jax_client, sinks=sinks, return_lse=True)

    def scalar(call):
        def value(do, dlse, *inputs):
            o, lse = call(*inputs)
            return (o * do).sum() + (lse * dlse).sum()

        return value

    actual = jax.jit(jax.grad(scalar(served), (2, 3, 4, 5)))(do, dlse, *inputs)
    with jax.enable_x64(True):
        wide = [np.asarray(t, np.float64) for t in (do, dlse, *inputs)]
        close(actual, jax.jit(jax.grad(scalar(dense), (2, 3, 4, 5)))(*wide))
        lse_alone = jax.jit(jax.grad(lambda q: dense(q, *wide[3:])[1].sum()))(wide[2])
    close(jax.grad(lambda q: served(q, *inputs[1:])[1].sum())(inputs[0]), lse_alone)


def test_float64_is_exact(jax_client):
    """The result is compared with `dense`, because JAX's attention computes its softmax in float32."""
    with jax.enable_x64(True):
        given = tensors((1, 2, 9, 5), (1, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 5), (2,), dtype="float64")
        actual = jax.jit(derived(lambda q, k, v, sinks: attention(q, k, v, client=jax_client, sinks=sinks)))(*given)
        assert {t.dtype.name for t in actual} == {"float64"}
        close(actual, jax.jit(derived(lambda *x: dense(*x)[0]))(*given))


def test_ragged_sequences(jax_client):
    q, k, v = tensors((12, 4, 8), (15, 2, 8), (15, 2, 8))
    starts, key_starts = [0, 4, 4, 12], [0, 6, 7, 15]
    options = {"client": jax_client, "layout": "thd", "causal": True, "return_lse": True}
    o, lse = jax.jit(lambda a, b: attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, **options))(
        jnp.asarray(starts), jnp.asarray(key_starts)
    )
    one, own = attention(q[4:], k[7:], v[7:], cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8], **options)
    same((o[4:], lse[:, 4:]), (one, own))


def test_dropout_keeps_its_seed_and_a_new_one_compiles_nothing(jax_client):
    """o is linear in v, so do·o = dv·v if and only if forward and backward drop the same weights."""
    do, q, k, v = tensors(*[(1, 2, 33, 8)] * 4)
    compiled = jax.jit(
        lambda seed, *x: derived(lambda v: attention(*x, v, client=jax_client, dropout_p=0.5, dropout_seed=seed))(do, v)
    )
    answers = [compiled(seed, q, k) for seed in jax.random.bits(jax.random.key(0), 2)]
    for o, dv in answers:
        np.testing.assert_allclose((dv * v).sum(), (o * do).sum(), rtol=1e-5, atol=1e-5)
    assert (answers[0][0] != answers[1][0]).any()
    assert compiled._cache_size() == 1
    with pytest.raises(flashpoint.InvalidInputError, match="dropout_seed: must be given"):
        attention(q, k, v, client=jax_client, dropout_p=0.5)


def test_a_step_that_is_run_again_and_a_loop(jax_client):
    q, k, v = tensors(*[(1, 2, 9, 8)] * 3)

    def layer(x, _):
        return attention(x, k, v, client=jax_client, causal=True), None

    def loss(layer):
        return lambda q: (jax.lax.scan(layer, q, length=3)[0] ** 2).sum()

    same(jax.jit(jax.grad(loss(jax.checkpoint(layer))))(q), jax.jit(jax.grad(loss(layer)))(q))


@pytest.mark.parametrize("wrap", [eager, jax.jit])
def test_a_second_derivative_raises(jax_client, wrap):
    q, k, v = tensors(*[(1, 1, 5, 8)] * 3)

    def first(q):
        return jax.grad(lambda q: (attention(q, k, v, client=jax_client) ** 2).sum())(q).sum()

    with pytest.raises(RuntimeError, match="second-order gradients of attention are not available"):
        wrap(jax.grad(first))(q)
    with pytest.raises(TypeError, match="forward-mode"):
        wrap(lambda q: jax.jvp(lambda q: attention(q, k, v, client=jax_client), (q,), (q,)))(q)


def test_errors_name_the_field(jax_client, caplog):
    q, k, v = tensors(*[(1, 2, 9, 8)] * 3)
    invalid = flashpoint.InvalidInputError
    for wrong, message in (
        ({"casual": True}, "casual: is not taken"),
        ({"with_meta": True}, "with_meta: is not taken"),
        ({"grads": ("dq",)}, "grads: autodiff requests what it needs"),
        ({"window": (1,)}, "window"),
        ({"attn_mask": [[True]]}, "attn_mask: must be a JAX or NumPy array, not list"),
        ({"kv_lengths": [1 << 32]}, "kv_lengths: is no array"),
        ({"kv_lengths": [[1], [2, 3]]}, "kv_lengths: is no array"),
        ({"dropout_seed": jnp.ones(())}, "dropout_seed: must be one integer"),
        ({"layout": "thd"}, "q: must have 3 dimensions, not 4"),
        ({"sinks": jnp.ones(3)}, "422 invalid_request: sinks"),  # this error comes from the server
    ):
        with pytest.raises(invalid, match=message):
            attention(q, k, v, client=jax_client, **wrong)
    for other in (flashpoint.AsyncClient("http://127.0.0.1:9"), None):
        with pytest.raises(invalid, match="client: must be a Client"):
            attention(q, k, v, client=other)
    with pytest.raises(invalid, match="k: must have as many dimensions as q"):
        jax.jit(lambda q: attention(q, k[0], v, client=jax_client))(q)
    with pytest.raises(invalid, match="alibi_slopes: has no gradient"):
        jax.jit(jax.grad(lambda slopes: attention(q, k, v, client=jax_client, alibi_slopes=slopes).sum()))(jnp.ones(2))
    compiled = jax.jit(lambda sinks: attention(q, k, v, client=jax_client, sinks=sinks))
    with pytest.raises(RuntimeError, match=r"InvalidInputError: 422 invalid_request: sinks: shape \[3\] must be \[2\]"):
        compiled(jnp.ones(3))
    assert "jax.pure_callback failed" in caplog.text
