"""Calls over KV caches: their options, the memory of a layer, and the `Spec` that checks their tensors."""

import pytest

from flashpoint_contract.caches import CHUNK, CacheOptions, LayerShape, layer_tokens, plan_cached, refused
from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.tensors import TensorInfo

LAYER = LayerShape(2, 8, 6, "float16")


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"caches": []}, ["caches"]),
        ({"caches": "a"}, ["caches"]),
        ({"caches": ["a", 3]}, ["caches"]),
        ({"caches": ["a"] * 4097}, ["caches"]),
        ({"caches": ["a"], "layer": -1, "at": [1.0]}, ["layer", "at"]),
        ({"caches": ["a"], "layer": True}, ["layer"]),
        ({"caches": ["a", "b"], "at": [1]}, ["at"]),
    ],
)
def test_a_wrong_option_is_named(options, fields):
    with pytest.raises(ProblemError) as wrong:
        CacheOptions.read(options)
    assert [error.field for error in wrong.value.errors] == fields


def test_options_have_defaults_and_are_refused_elsewhere():
    assert CacheOptions.read({"caches": ["a", "b"], "at": [0, 7]}) == CacheOptions(("a", "b"), 0, (0, 7))
    assert [name for name, _ in refused(["layer", "causal", "at"])] == ["layer", "at"]


def test_memory_grows_by_doubling_within_a_chunk_and_by_chunks_beyond():
    assert [layer_tokens(n) for n in (0, 1, 16, 17, 1000, CHUNK, CHUNK + 1)] == [0, 16, 16, 32, 1024, 1024, 1040]
    assert all(n <= layer_tokens(n) <= max(16, 2 * n) for n in range(1, 3 * CHUNK))


def test_a_call_that_reads_is_planned_without_keys_and_a_call_that_writes_with_its_own():
    q = TensorInfo("float16", (3, 4, 5, 8))
    read = plan_cached({"q": q}, Options(causal=True), LAYER, 3)
    assert (read.batch, read.q_heads, read.kv_heads, read.outputs["o"].shape) == (3, 4, 2, (3, 4, 5, 6))
    new = {"k": TensorInfo("float16", (3, 2, 5, 8)), "v": TensorInfo("float16", (3, 2, 5, 6))}
    assert plan_cached({"q": q, **new}, Options(causal=True), LAYER, 3) == read
    for columns in (77, 0):
        masked = plan_cached({"q": q, "attn_mask": TensorInfo("bool", (5, columns))}, Options(), LAYER, 3)
        assert masked.kv_len == columns


@pytest.mark.parametrize(
    ("change", "caches", "message"),
    [
        ({"q": TensorInfo("float32", (3, 4, 5, 8))}, 3, "q: dtype float32 must be the cache's: float16"),
        ({}, 2, "caches: 2 caches for 3 sequences of q"),
        ({"k": TensorInfo("float16", (3, 2, 5, 8))}, 3, "v: missing|k: missing"),
        ({"kv_lengths": TensorInfo("int32", (3,))}, 3, "kv_lengths: cannot be combined with caches"),
        ({"q": TensorInfo("float16", (5, 8))}, 1, "q: has one head, but the cache has 2 key/value heads"),
    ],
)
def test_a_call_that_does_not_fit_the_caches_is_refused(change, caches, message):
    tensors = {"q": TensorInfo("float16", (3, 4, 5, 8)), **change}
    with pytest.raises(ProblemError, match=message):
        plan_cached(tensors, Options(), LAYER, caches)


def test_a_cache_of_8_bits_takes_three_dtypes():
    layer = LAYER._replace(dtype="int8")
    for dtype in ("float16", "bfloat16", "float32"):
        assert plan_cached({"q": TensorInfo(dtype, (1, 2, 1, 8))}, Options(), layer, 1).dtype == dtype
    with pytest.raises(ProblemError, match="must be the cache's: float16 or bfloat16 or float32"):
        plan_cached({"q": TensorInfo("float64", (1, 2, 1, 8))}, Options(), layer, 1)
