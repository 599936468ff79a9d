"""The placeholder tensor for keys on a server has their shape and can change its device; any computation raises."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from flashpoint.integrations.transformers.held import HeldTensor


class Update:
    """A fake cache update that counts the calls of `misused`."""

    def __init__(self, registered):
        self.registered, self.misuses = registered, 0

    def attention(self, q, mask, causal, window, **options):
        raise AssertionError("no attention runs")

    def misused(self):
        self.misuses += 1
        return self.registered


def test_sizes_can_be_read_and_a_device_changed():
    update = Update(True)
    held = HeldTensor.of(torch.zeros(2, 3, 4, 5), update)
    assert (held.shape, held.size(2), held.dim(), held.dtype, len(held)) == ((2, 3, 4, 5), 4, 4, torch.float32, 2)
    moved = held.to("cpu")
    assert isinstance(moved, HeldTensor)
    assert moved.update is update
    assert update.misuses == 0


@pytest.mark.parametrize(
    "compute", [lambda t: t + 1, lambda t: torch.zeros(5, 4) @ t, lambda t: t[0], lambda t: t.mT, lambda t: t.tolist()]
)
@pytest.mark.parametrize(
    ("registered", "message"),
    [
        (True, "past_key_values: cannot be a RemoteCache: this model computes with what it caches"),
        (False, r"attn_implementation: must be one of flashpoint's register\(\)"),
    ],
)
def test_who_computes_with_it_is_told_what_to_do(compute, registered, message):
    update = Update(registered)
    with pytest.raises(flashpoint.InvalidInputError, match=message):
        compute(HeldTensor.of(torch.zeros(2, 3, 4, 5), update))
    assert update.misuses == 1
