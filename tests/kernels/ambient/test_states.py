"""Each public function has the bits of the plain state in each state that a process can be in, or refuses in words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.kernels.ambient.calls import CALLS, Call, Tensors
from tests.kernels.ambient.states import STATES


def solved(call: Call, t: Tensors, cast: bool = False) -> Mapping[str, Tensor]:
    """Return the answers of a call for inputs that require gradients where the call has leaves."""
    given = {n: x if x.is_inference() else x.detach().requires_grad_(n in call.leaves) for n, x in t.items()}
    return call.run(given, call.casts if cast else ())


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], forward: bool) -> str:
    """Return a sentence about the first difference in bits, shapes, dtypes or devices; empty without one."""
    names = [name for name in expected if not (forward and name.startswith("d"))]
    if sorted(found) != sorted(names):
        return f"has {sorted(found)}, not {sorted(names)}"
    for name in names:
        x, y = found[name].detach(), expected[name].detach()
        if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            return f"{name} is {tuple(x.shape)} {x.dtype} {x.device}, not {tuple(y.shape)} {y.dtype} {y.device}"
        bits = [t.as_subclass(Tensor).resolve_neg().contiguous().view(torch.uint8) for t in (x, y)]
        if not torch.equal(*bits):
            return f"{name} differs by {(x.double() - y.double()).abs().max():.3g}"
    return ""


@pytest.fixture(scope="module")
def plain() -> dict[str, Mapping[str, Tensor]]:
    return {name: solved(call, call.inputs()) for name, call in CALLS.items()}


@pytest.mark.parametrize("state", STATES)
def test_each_function_is_right_in_each_state(state: str, plain: Mapping[str, Mapping[str, Tensor]]) -> None:
    given, wrong = STATES[state], {}
    for name, call in CALLS.items():
        inputs = call.inputs()
        expected = plain[name]
        if given.expected == "cast" and call.casts:
            expected = solved(call, inputs, cast=True)
        try:
            changed = given.change(inputs)
            with given.enter():
                found = solved(call, changed)
        except Exception as error:  # any error is reported with its call
            wrong[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if given.expected == "cast" and call.of_torch:
            continue
        if text := difference(found, expected, given.expected == "forward" and bool(call.leaves)):
            wrong[name] = text
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
