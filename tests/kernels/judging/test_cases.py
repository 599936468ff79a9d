"""Cases are drawn from seeds, and can be rebuilt from their fields."""

from __future__ import annotations

import flashpoint_kernels
from flashpoint_kernels.judging.cases import random_case
from tests.judge.corpus import WRONG


def test_a_random_case_finds_a_wrong_kernel() -> None:
    """A random case finds a wrong kernel, so a test of right kernels on random cases (test_trial.py) can fail."""
    case = random_case(4, ("causal",)).to_dict()
    assert flashpoint_kernels.judge(WRONG["no_rescale"].function, only=case | {"kv_len": 300}).verdict == "wrong"
