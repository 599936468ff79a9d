"""The judge finds a function by its name, and refuses an object that is no kernel."""

from __future__ import annotations

import subprocess
import sys

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


FIRST_GRADIENT = """
import sys
import torch
import flashpoint_kernels.judging.child

flashpoint_kernels.judging.child.import_for_gradients()
before = set(sys.modules)
x = torch.ones(1, requires_grad=True)
torch.autograd.grad(x * x, x, x)
print(sorted(set(sys.modules) - before))
"""


def test_a_session_has_the_modules_that_a_first_gradient_imports() -> None:
    """The judge imports the modules of a first torch gradient before it forks, so that its children need not."""
    ran = subprocess.run([sys.executable, "-c", FIRST_GRADIENT], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
