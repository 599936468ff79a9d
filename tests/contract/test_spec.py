"""`plan` makes a `Spec` from shapes and dtypes: sizes, FLOPs, outputs, required features, and one row per sequence."""

import itertools

import pytest

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import _planned, plan
from flashpoint_contract.tensors import TensorInfo


def infos(q_len=5, kv_len=7, heads=(4, 2), dims=(8, 6), layout="bhsd", batch=2, **more):
    def shape(heads, length, dim):
        return (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)

    shapes = shape(heads[0], q_len, dims[0]), shape(heads[1], kv_len, dims[0]), shape(heads[1], kv_len, dims[1])
    return {name: TensorInfo("float32", one) for name, one in zip("qkv", shapes, strict=True)} | more


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_a_plan_for_another_number_of_keys_is_as_if_planned_anew(layout, causal, window):
    options = Options(layout=layout, causal=causal, window=window, return_lse=True)
    for kv_len in (1, 2, 7, 300):
        tensors = infos(kv_len=kv_len, layout=layout)
        grown = plan(tensors, options, "forward")
        anew = _planned.__wrapped__(tuple(tensors.items()), options, "forward")
        assert grown == anew
        for name in ("features", "level", "window", "outputs", "lse_shape", "sizes", "flops", "footprint"):
            assert getattr(grown, name) == getattr(anew, name)


def test_work_and_answers_follow_from_the_sizes():
    spec = plan(infos(), Options(return_lse=True), "forward")
    assert spec.outputs == {"o": TensorInfo("float32", (2, 4, 5, 6)), "lse": TensorInfo("float32", (2, 4, 5))}
    assert spec.flops == 2 * 2 * 4 * 5 * 7 * (8 + 6)
    assert {"gqa", "value_dim", "lse", "float32"} <= spec.features
    square = plan(infos(kv_len=5), Options(causal=True), "forward")
    assert (square.causal_square, square.flops) == (True, 2 * 4 * 5 * 5 * 14)
    do = TensorInfo("float32", (2, 4, 5, 6))
    backward = plan(infos(do=do), Options(), "backward")
    assert backward.flops == spec.flops * 7 // 2 + spec.flops
    assert backward.forward == plan(infos(), Options(return_lse=True), "forward")
    assert set(backward.outputs) == {"dq", "dk", "dv"}


def test_rows_of_packed_sequences_follow_from_where_they_begin():
    tensors = {"q": TensorInfo("float32", (6, 2, 8)), "k": TensorInfo("float32", (9, 1, 8))}
    tensors |= {"v": tensors["k"], **{f"cu_seqlens_{name}": TensorInfo("int64", (4,)) for name in "qk"}}
    spec = plan(tensors, Options(layout="thd"), "forward")
    rows = spec.rows({"cu_seqlens_q": [0, 2, 2, 6], "cu_seqlens_k": [0, 4, 5, 9]})
    assert [(row.index, row.q_start, row.q_len, row.kv_start, row.kv_len, row.offset) for row in rows] == [
        (0, 0, 2, 0, 4, 2), (1, 2, 0, 4, 1, 1), (2, 2, 4, 5, 4, 0),
    ]  # fmt: skip
    for wrong in ([0, 2, 1, 6], [1, 2, 2, 6], [0, 2, 2, 5]):
        with pytest.raises(ProblemError, match="cu_seqlens_q: must start at 0, never decrease, and end at 6"):
            spec.rows({"cu_seqlens_q": wrong, "cu_seqlens_k": [0, 4, 5, 9]})


def test_rows_of_padded_sequences_have_their_lengths_and_offsets():
    lengths = TensorInfo("int32", (2,))
    spec = plan(infos(q_lengths=lengths, kv_lengths=lengths, offset=lengths), Options(causal=True), "forward")
    rows = spec.rows({"q_lengths": [5, 0], "kv_lengths": [7, 3], "offset": 4})
    assert [(row.batch, row.q_len, row.q_rows, row.kv_len, row.kv_rows, row.offset) for row in rows] == [
        (0, 5, 5, 7, 7, 4), (1, 0, 5, 3, 7, 4),
    ]  # fmt: skip
    with pytest.raises(ProblemError) as refused:
        spec.rows({"q_lengths": [6, 0], "kv_lengths": [-1, 0], "offset": [1 << 30, 0]})
    assert [error.field for error in refused.value.errors] == ["q_lengths", "kv_lengths", "offset"]


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (infos(heads=(4, 3)), {}, "q: its 4 heads must be a positive multiple of k's 3"),
        (infos() | {"k": TensorInfo("float32", (2, 2, 7, 9))}, {}, "k: head dimension 9 must be q's, 8"),
        (infos() | {"v": TensorInfo("float32", (2, 2, 6, 6))}, {}, r"v: heads and length .* must be k's, \(2, 7\)"),
        (infos(batch=2) | {"q": TensorInfo("float32", (3, 4, 5, 8))}, {}, "k: batch 2 must be q's, 3"),
        (infos(sinks=TensorInfo("float32", (3,))), {}, r"sinks: shape \[3\] must be \[4\]"),
        (infos(attn_mask=TensorInfo("bool", (5, 6))), {}, "attn_mask: .* does not broadcast to"),
        (infos(cu_seqlens_q=TensorInfo("int32", (3,))), {}, "cu_seqlens_q: is only for layout thd, not bhsd"),
        (infos(offset=TensorInfo("int32", ())), {"causal_alignment": "top_left"}, "offset: cannot be combined with"),
        (infos(sink=TensorInfo("float32", (4,))), {}, "sink: unknown tensor; did you mean sinks?"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tensors, options, message):
    with pytest.raises(ProblemError, match=message):
        plan(tensors, Options(**options), "forward")


def test_a_level_is_the_highest_of_the_features():
    options = {"causal": True}, {"window": (3, 0)}, {"dropout_p": 0.5, "dropout_seed": 1}
    levels = [plan(infos(), Options(**one), "forward").level for one in ({}, *options)]
    assert levels == [0, 0, 1, 2]
    for one, other in itertools.combinations(range(3), 2):
        both = plan(infos(), Options(**options[one], **options[other]), "forward")
        assert both.level == max(levels[1 + one], levels[1 + other])
