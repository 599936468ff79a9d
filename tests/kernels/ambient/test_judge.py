"""The judge's verdict does not depend on the state of the program that calls it."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from tests.judge.small import judged
from tests.kernels.ambient.states import STATES


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    ["autocast, disabled", "bfloat16 on meta", "default dtype float64", "inference_mode", "autocast", "flush to zero"],
)
def test_verdicts_are_those_of_the_plain_state(state: str) -> None:
    with STATES[state].enter():
        verdicts = [judged(function).verdict for function in (right, in_bfloat16)]
    assert verdicts == ["right", "wrong"]
