"""The example requests of /docs. Each can be sent unchanged."""

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
    causal=("Two queries, a causal mask", {**_SQUARE, "causal": True}),
    ragged=("Two packed sequences, of 1 and 2 queries", {**_RAGGED, "return_lse": True}),
    masked=("A boolean mask", {**_SQUARE, "attn_mask": [[True, False], [True, True]], "dtype": "float16"}),
    empty=(
        "No keys: the answer is zeros",
        {"q": [[1.0, 0.0]], "k": {"shape": [0, 2], "data": []}, "v": {"shape": [0, 2], "data": []}},
    ),
)
BACKWARD = _named(
    causal=("Two queries, a causal mask", {**_SQUARE, "do": _ONES, "causal": True}),
    ragged=("Two packed sequences, of 1 and 2 queries", {**_RAGGED, "do": _RAGGED["v"], "grads": ["dv", "dq"]}),
    mask=("The gradient of a float mask", {**_SQUARE, "do": _ONES, "attn_mask": [[0.5, 0.0]], "grads": ["dattn_mask"]}),
)
VERIFY = _named(
    drawn=("A problem that the server draws from a seed", {"shape": {"q_len": 64, "head_dim": 32}}),
    given=("An answer of your own", {**_SQUARE, "causal": True, "o": [[1.0, 2.0], [2.339523, 3.339523]]}),
)
BENCHMARK = _named(
    grid=(
        "One shape, with and without a causal mask",
        {"shapes": [{"q_heads": 2, "q_len": 128, "head_dim": 64}], "causal": [False, True], "max_seconds": 0.1},
    ),
)
