"""Requests that /docs shows: each can be sent as it is."""

from __future__ import annotations

from typing import Any

_SQUARE = {
    "q": [[1.0, 0.0], [0.0, 1.0]],
    "k": [[1.0, 0.0], [0.0, 1.0]],
    "v": [[1.0, 2.0], [3.0, 4.0]],
}
_ONES = [[1.0, 1.0], [1.0, 1.0]]
_RAGGED = {
    "q": [[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]],
    "k": [[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]],
    "v": [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]],
    "layout": "thd",
    "cu_seqlens_q": [0, 1, 3],
    "cu_seqlens_k": [0, 1, 3],
}


def _named(**values: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: {"summary": summary, "value": value} for name, (summary, value) in values.items()}


FORWARD = _named(
    causal=("two queries, a causal mask", {**_SQUARE, "causal": True}),
    ragged=("sequences of 1 and 2, packed", {**_RAGGED, "return_lse": True}),
    masked=("a mask of booleans", {**_SQUARE, "attn_mask": [[True, False], [True, True]], "dtype": "float16"}),
    empty=(
        "no keys: an answer of zeros",
        {"q": [[1.0, 0.0]], "k": {"shape": [0, 2], "data": []}, "v": {"shape": [0, 2], "data": []}},
    ),
)
BACKWARD = _named(
    causal=("two queries, a causal mask", {**_SQUARE, "do": _ONES, "causal": True}),
    ragged=("sequences of 1 and 2, packed", {**_RAGGED, "do": _RAGGED["v"], "grads": ["dv", "dq"]}),
    mask=("the gradient of a float mask", {**_SQUARE, "do": _ONES, "attn_mask": [[0.5, 0.0]], "grads": ["dattn_mask"]}),
)
VERIFY = _named(
    drawn=("a problem that the server draws", {"shape": {"q_len": 64, "head_dim": 32}}),
    given=("an answer from elsewhere", {**_SQUARE, "causal": True, "o": [[1.0, 2.0], [2.339523, 3.339523]]}),
)
BENCHMARK = _named(
    grid=(
        "one shape, with and without a causal mask",
        {"shapes": [{"q_heads": 2, "q_len": 128, "head_dim": 64}], "causal": [False, True], "max_seconds": 0.1},
    ),
)
