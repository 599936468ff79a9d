"""`plan` checks names, dtypes and shapes, and reports all errors of the first check that fails, with their fields."""

from dataclasses import fields
from typing import Any

import pytest

from flashpoint_contract.options import GRADS, Options, ProblemError
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo

F32 = "float32"
Q, K = (2, 4, 5, 8), (2, 2, 7, 8)


def infos(**shapes: Any) -> dict[str, TensorInfo]:
    """Return infos of q, k, v: two sequences, 4 query heads, 2 key heads. Keywords set a tensor; None removes it."""
    given = {"q": Q, "k": K, "v": K} | shapes
    return {
        name: TensorInfo(*x) if isinstance(x[0], str) else TensorInfo(F32, x)
        for name, x in given.items()
        if x is not None
    }


def ragged(**shapes: Any) -> dict[str, TensorInfo]:
    index = ("int32", (3,))
    return infos(
        **({"q": (9, 4, 8), "k": (11, 2, 8), "v": (11, 2, 8), "cu_seqlens_q": index, "cu_seqlens_k": index} | shapes)
    )


THD = {"layout": "thd"}
BACKWARD = {"do": Q}

# (the field at fault, tensors, options, direction)
BAD: list[tuple[str, dict[str, TensorInfo], dict[str, Any], str]] = [
    ("query", infos(query=Q), {}, "forward"),
    ("do", infos(do=Q), {}, "forward"),
    ("dlse", infos(dlse=Q[:3]), {}, "forward"),
    ("q", infos(q=None), {}, "forward"),
    ("v", infos(v=None), {}, "forward"),
    ("do", infos(), {}, "backward"),
    ("q", infos(q=("int32", Q), k=("int32", K), v=("int32", K)), {}, "forward"),
    ("k", infos(k=("float16", K)), {}, "forward"),
    ("do", infos(do=("float16", Q)), {}, "backward"),
    ("attn_mask", infos(attn_mask=("int32", (5, 7))), {}, "forward"),
    ("sinks", infos(sinks=("bool", (4,))), {}, "forward"),
    ("alibi_slopes", infos(alibi_slopes=("int64", (4,))), {}, "forward"),
    ("kv_lengths", infos(kv_lengths=(2,)), {}, "forward"),
    ("lse", infos(**BACKWARD, o=Q, lse=("float16", Q[:3])), {}, "backward"),
    ("v", infos(v=(2, 2, -7, 8)), {}, "forward"),
    ("q", infos(q=(8,), k=(8,), v=(8,)), {}, "forward"),
    ("k", infos(k=(2, 7, 8)), {}, "forward"),
    ("k", infos(k=(3, 2, 7, 8)), {}, "forward"),
    ("v", infos(v=(3, 2, 7, 8)), {}, "forward"),
    ("k", infos(k=(2, 2, 7, 9)), {}, "forward"),
    ("v", infos(v=(2, 2, 6, 8)), {}, "forward"),
    ("v", infos(v=(2, 1, 7, 8)), {}, "forward"),
    ("q", infos(q=(2, 3, 5, 8)), {}, "forward"),
    ("q", infos(q=(2, 0, 5, 8)), {}, "forward"),
    ("q", infos(q=(2, 5, 4, 8)), {"layout": "bhsd"}, "forward"),
    ("do", infos(do=(2, 4, 5, 9)), {}, "backward"),
    ("o", infos(**BACKWARD, o=K, lse=Q[:3]), {}, "backward"),
    ("lse", infos(**BACKWARD, o=Q, lse=(2, 4, 6)), {}, "backward"),
    ("lse", infos(**BACKWARD, o=Q), {}, "backward"),
    ("o", infos(**BACKWARD, lse=Q[:3]), {}, "backward"),
    ("dlse", infos(**BACKWARD, dlse=(2, 5, 4)), {}, "backward"),
    ("sinks", infos(sinks=(2,)), {}, "forward"),
    ("alibi_slopes", infos(alibi_slopes=(4, 2)), {}, "forward"),
    ("q_lengths", infos(q_lengths=("int32", (3,))), {}, "forward"),
    ("attn_mask", infos(attn_mask=(5, 6)), {}, "forward"),
    ("attn_mask", infos(attn_mask=(1, 2, 4, 5, 7)), {}, "forward"),
    ("attn_mask", infos(q=(5, 8), k=(7, 8), v=(7, 8), attn_mask=(1, 5, 7)), {}, "forward"),
    ("cu_seqlens_q", infos(cu_seqlens_q=("int32", (3,))), {}, "forward"),
    ("cu_seqlens_k", ragged(cu_seqlens_k=None), THD, "forward"),
    ("cu_seqlens_k", ragged(cu_seqlens_k=("int32", (4,))), THD, "forward"),
    ("attn_mask", ragged(attn_mask=(9, 11)), THD, "forward"),
    ("kv_lengths", ragged(kv_lengths=("int32", (2,))), THD, "forward"),
    ("q", ragged(q=(1, 9, 4, 8)), THD, "forward"),
    ("dropout_seed", infos(**BACKWARD), {"dropout_p": 0.1}, "backward"),
    ("grads", infos(**BACKWARD), {"grads": ["dattn_mask"]}, "backward"),
    ("grads", infos(**BACKWARD, attn_mask=("bool", (5, 7))), {"grads": ["dattn_mask"]}, "backward"),
    ("grads", infos(**BACKWARD), {"grads": ["dsinks"]}, "backward"),
]


@pytest.mark.parametrize(("field", "tensors", "options", "direction"), BAD)
def test_the_field_at_fault_is_named(field: str, tensors: Any, options: Any, direction: Any) -> None:
    with pytest.raises(ProblemError) as refused:
        plan(tensors, Options(**options), direction)
    assert [name for name, _ in refused.value.errors] == [field]
    assert all(message for _, message in refused.value.errors)


def test_every_fault_of_a_kind_is_named() -> None:
    with pytest.raises(ProblemError) as refused:
        plan(infos(sinks=(1,), alibi_slopes=(1,), attn_mask=(9, 9)), Options(), "forward")
    assert {name for name, _ in refused.value.errors} == {"sinks", "alibi_slopes", "attn_mask"}


BAD_OPTIONS: list[tuple[str, Any]] = [
    ("layout", "sbhd"),
    ("causal", 1),
    ("causal_alignment", "left"),
    ("window", 5),
    ("window", "12"),
    ("window", (1,)),
    ("window", (-2, 0)),
    ("window", (0, 2**30 + 1)),
    ("window", (True, 0)),
    ("scale", float("nan")),
    ("scale", "1"),
    ("softcap", -1.0),
    ("softcap", float("inf")),
    ("dropout_p", 1.0),
    ("dropout_p", -0.1),
    ("dropout_p", True),
    ("dropout_seed", -1),
    ("dropout_seed", 2**64),
    ("dropout_seed", 1.5),
    ("precision", "bf16"),
    ("return_lse", None),
    ("return_key_weights", None),
    ("deterministic", "yes"),
    ("grads", []),
    ("grads", "dq"),
    ("grads", ["dz"]),
    ("grads", ["dq", "dq"]),
    ("backend", "cuda"),
    ("block_size", (128, 100)),
    ("block_size", 128),
    ("block_size", (0, 16)),
]


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS)
def test_bad_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(ProblemError) as refused:
        Options(**{field: value})
    assert [name for name, _ in refused.value.errors] == [field]


def test_options_are_those_of_the_contract() -> None:
    assert {field.name: field.default for field in fields(Options)} == {
        "layout": "bhsd", "causal": False, "causal_alignment": "bottom_right", "window": (-1, -1),
        "block_size": (128, 128), "scale": None,
        "softcap": 0.0, "dropout_p": 0.0, "dropout_seed": None, "precision": "ieee", "return_lse": False,
        "return_key_weights": False,
        "grads": ("dq", "dk", "dv"), "deterministic": True, "backend": "auto",
    }  # fmt: skip
    assert GRADS == ("dq", "dk", "dv", "dattn_mask", "dsinks")


@pytest.mark.parametrize(
    ("field", "index"),
    [
        ("cu_seqlens_q", {"cu_seqlens_q": [1, 4, 9], "cu_seqlens_k": [0, 4, 11]}),
        ("cu_seqlens_q", {"cu_seqlens_q": [0, 10, 9], "cu_seqlens_k": [0, 4, 11]}),
        ("cu_seqlens_k", {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 4, 10]}),
    ],
)
def test_cu_seqlens_cover_the_rows_in_order(field: str, index: dict[str, list[int]]) -> None:
    spec = plan(ragged(), Options(layout="thd"), "forward")
    with pytest.raises(ProblemError) as refused:
        spec.rows(index)
    assert [name for name, _ in refused.value.errors] == [field]


@pytest.mark.parametrize("lengths", [[0, 6], [-1, 5]])
def test_lengths_lie_within_the_rows(lengths: list[int]) -> None:
    spec = plan(infos(q_lengths=("int64", (2,))), Options(), "forward")
    with pytest.raises(ProblemError, match="q_lengths"):
        spec.rows({"q_lengths": lengths})


def test_outputs_have_the_inputs_layout() -> None:
    assert plan(infos(v=(2, 2, 7, 3)), Options(return_lse=True), "forward").outputs == {
        "o": TensorInfo(F32, (2, 4, 5, 3)),
        "lse": TensorInfo(F32, (2, 4, 5)),
    }
    assert plan(ragged(), Options(layout="thd", return_lse=True), "forward").outputs["lse"] == TensorInfo(F32, (4, 9))
    mask = {"attn_mask": ("float16", (4, 1, 7))}
    tensors = infos(**BACKWARD, **mask)
    assert plan(tensors, Options(grads=["dattn_mask", "dv"]), "backward").outputs == {  # type: ignore[arg-type]
        "dattn_mask": TensorInfo("float16", (4, 1, 7)),
        "dv": TensorInfo(F32, K),
    }
