"""The judge finds a function by its name, and refuses an object that is no kernel."""

from __future__ import annotations

import pytest

import flashpoint_kernels
from flashpoint_kernels.judging import UnusableError
from tests.judge.small import SMALL


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.judge.rude:no_such", "tests.judge.rude has no no_such"),
        ("no_such_module:f", "there is no module no_such_module"),
        ("tests.judge.rude:HANGS", "must be a function, not tuple"),
        ("os:getcwd", "getcwd has 0 parameters"),
    ],
)
def test_what_is_no_kernel_is_refused(target: str, message: str) -> None:
    with pytest.raises(UnusableError, match=message):
        flashpoint_kernels.judge(target, quick=True, only=SMALL)
