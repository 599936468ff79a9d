"""The table TENSORS gives each tensor's shape, head axis and allowed dtypes, for every layout and rank."""

import pytest

from flashpoint_contract.options import OPTIONS, ProblemError
from flashpoint_contract.tensors import EXTRAS, FEATURES, GRADS, REQUIRED, TENSORS, TensorInfo, check_dtypes, needed

SIZES = {"B": 2, "B+1": 3, "Hq": 6, "Hk": 3, "Sq": 5, "Sk": 7, "D": 8, "Dv": 4, "q_blocks": 1, "k_blocks": 2}


@pytest.mark.parametrize(
    ("name", "layout", "rank", "shape"),
    [
        ("q", "bhsd", 4, (2, 6, 5, 8)), ("q", "bshd", 4, (2, 5, 6, 8)), ("q", "thd", 3, (5, 6, 8)),
        ("v", "bhsd", 3, (2, 7, 4)), ("v", "bshd", 3, (2, 7, 4)), ("v", "bhsd", 2, (7, 4)),
        ("lse", "bhsd", 4, (2, 6, 5)), ("lse", "bshd", 4, (2, 6, 5)), ("lse", "thd", 3, (6, 5)),
        ("k_scale", "bshd", 4, (2, 7, 3)), ("k_scale", "thd", 3, (7, 3)), ("attn_mask", "bshd", 4, (2, 6, 5, 7)),
        ("sinks", "thd", 3, (6,)), ("cu_seqlens_q", "thd", 3, (3,)), ("block_mask", "bhsd", 4, (2, 6, 1, 2)),
        ("dv", "bshd", 4, (2, 7, 3, 4)), ("dattn_mask", "bhsd", 4, (2, 6, 5, 7)),
    ],
)  # fmt: skip
def test_a_tensor_has_its_shape_in_each_layout_and_rank(name, layout, rank, shape):
    row = TENSORS[name]
    assert row.shape(SIZES, layout, rank) == shape
    axis = row.head_axis(layout)
    if axis is not None and rank != 2 and not (rank == 3 and layout != "thd"):
        assert shape[axis] in (6, 3)
    least = row.smallest_shape(SIZES, layout, rank)
    assert all(m in (1, n) for m, n in zip(least, shape, strict=True))
    assert (least == shape) == (not row.broadcast)


def test_pages_replace_the_sequences_of_keys_alone():
    sizes = SIZES | {"pool": 9, "page_size": 16, "pages": 4}
    assert TENSORS["k"].shape(sizes, "thd", 3) == (9, 16, 3, 8)
    assert TENSORS["q"].shape(sizes, "thd", 3) == (5, 6, 8)
    assert TENSORS["block_table"].shape(sizes, "thd", 3) == (2, 4)
    assert needed("thd", "forward", paged=True) == ["q", "k", "v", "cu_seqlens_q", "kv_lengths"]


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"k": "float16"}, ["k"]),
        ({"q": "int32"}, ["q"]),
        ({"v": "int8"}, ["v", "v_scale"]),
        ({"k": "int8", "v": "int8"}, ["k_scale", "v_scale"]),
        ({"k_scale": "float32"}, ["k_scale"]),
        ({"k": "int8", "v": "float8_e4m3fn", "k_scale": "float32", "v_scale": "float32"}, ["v"]),
        ({"attn_mask": "int32", "q_lengths": "float32"}, ["attn_mask", "q_lengths"]),
    ],
)
def test_dtypes_and_scales_that_do_not_fit_are_named(change, fields):
    dtypes = dict.fromkeys("qkv", "float32") | change
    with pytest.raises(ProblemError) as refused:
        check_dtypes({name: TensorInfo(dtype, (1, 1)) for name, dtype in dtypes.items()}, "forward")
    assert [error.field for error in refused.value.errors] == fields


def test_eight_bit_keys_with_their_scales_are_taken_by_the_forward_alone():
    dtypes = {"q": "bfloat16", "k": "int8", "v": "int8", "k_scale": "float32", "v_scale": "float16"}
    infos = {name: TensorInfo(dtype, (1, 1)) for name, dtype in dtypes.items()}
    check_dtypes(infos, "forward")
    with pytest.raises(ProblemError, match="k: dtype int8 must be q's, bfloat16"):
        check_dtypes(infos, "backward")


def test_the_lists_that_are_derived_from_the_table_agree_with_it():
    assert REQUIRED == {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "do")}
    assert {name[1:] for name in GRADS} == {name for name, row in TENSORS.items() if row.gradient}
    assert {"bool_mask", "float_mask"} <= set(EXTRAS)
    assert not {"attn_mask", "k_scale", "block_table", "cu_seqlens_q"} & set(EXTRAS)
    for name, (field, feature) in FEATURES.items():
        assert feature.name == name
        assert field in TENSORS or field in OPTIONS
