"""Inputs at the limits of floating point and their answers: the cases of test_extremes.py and docs/numerics.md.

The problem has two sequences, two heads, 5 queries, 7 keys, a head dimension of 16 and a float mask. The extreme value
is in the first head of the first sequence: in one element (NaN, infinities), or in each element (1e4, subnormal
numbers, negative zeros). `WORDS` lists the possible effects on an answer; the tests expect exactly the case's effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.kernels.solving import normal, qkv

ROW, KEY, COLUMN = 2, 4, 3  # the position of the changed element: row of a query, row of a key, column

PLACES = {"q": (ROW, COLUMN), "k": (KEY, COLUMN), "v": (KEY, COLUMN), "do": (ROW, COLUMN), "attn_mask": (ROW, KEY)}
ANSWERS = ("o", "lse", "dq", "dk", "dv")

# "Its" refers to the changed element. All other numbers have the same bits as without the extreme value.
WORDS = {
    "kept": "as without it",
    "row": "its row is NaN",
    "row up": "its row is NaN or +∞",
    "row odd": "its row is NaN or infinite",
    "column": "its column is NaN",
    "column infinite": "its column is infinite",
    "head": "its head is NaN",
    "head odd": "its head is NaN or infinite",
    "rows": "NaN where the score is +∞; else as without that key",
    "rows up": "NaN or +∞ where the score is +∞; else as without that key",
    "rows and column": "NaN where the score is +∞, and in its column; else as without that key",
    "near": "float64's, to its dtype; beyond the dtype ±∞",
    "unseen": "as where its row does not see the key",
    "equal": "as with +0",
}


@dataclass(frozen=True)
class Extreme:
    """An extreme `value` in the input `place`; `answers` has the effect on each of ANSWERS, as a key of `WORDS`."""

    place: str
    value: str
    dtypes: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.value} in {self.place}"

    def tensors(self, dtype: str) -> dict[str, Tensor]:
        """Return the inputs of a gradient problem, with the extreme value in one of them."""
        t = plain(dtype)
        edge = t[self.place][0, 0]
        if self.value in ONE:
            edge[PLACES[self.place]] = ONE[self.value]
        elif self.value == "1e4":
            edge *= 1e4
        elif self.value == "subnormal":  # small multiples of the smallest positive number, of both signs
            edge.copy_((edge * 64).round() * torch.finfo(edge.dtype).smallest_normal * torch.finfo(edge.dtype).eps)
        else:
            edge.fill_(-0.0)
        return t


ONE = {"NaN": math.nan, "+∞": math.inf, "−∞": -math.inf}
HALF, ALL = ("float16", "bfloat16"), ("float32", "float16", "bfloat16")


def plain(dtype: str) -> dict[str, Tensor]:
    t = qkv(2, 2, 5, 7, 16, dtype=getattr(torch, dtype))
    return t | {"attn_mask": normal(2, 2, 5, 7, seed=9, dtype=getattr(torch, dtype))}


def _one(place: str, *answers: str) -> dict[str, Extreme]:
    """Return the cases of NaN, +∞ and −∞ at a place. In "a|b", a is the effect of NaN, and b of both infinities."""
    given = [word.split("|") for word in answers]
    values = {"NaN": [w[0] for w in given], "+∞": [w[-1] for w in given], "−∞": [w[-1] for w in given]}
    return {f"{v} in {place}": Extreme(place, v, ("float32",), tuple(words)) for v, words in values.items()}


CASES: dict[str, Extreme] = {
    **_one("q", "row", "row|row up", "row", "head", "head"),
    **_one("k", "head|rows", "head|rows up", "head|rows and column", "head", "head"),
    **_one("v", "column|column infinite", "kept", "head|head odd", "head|head odd", "kept"),
    **_one("do", "kept", "kept", "row|row odd", "head|head odd", "column|column infinite"),
    **_one("attn_mask", "row", "row|row up", "row", "head", "head"),
    "−∞ in attn_mask": Extreme("attn_mask", "−∞", ("float32",), ("unseen",) * 5),
    **{f"{v} in {p}": Extreme(p, v, d, ("near",) * 5) for v, d in (("1e4", HALF), ("subnormal", ALL)) for p in PLACES},
    **{f"−0 in {p}": Extreme(p, "−0", ("float32",), ("equal",) * 5) for p in PLACES},
}
