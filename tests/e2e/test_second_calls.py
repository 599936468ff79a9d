"""A call with other values in tensors of the same shapes, hence in the same memory of the server, is computed anew."""

import pytest
import torch

from tests.e2e.test_surfaces import ENTRIES, PATHS, problem, solve
from tests.support.messages import message, post

OTHER_OPTIONS = {"dropout_seed": lambda seed: seed + 1}  # data of each call; other options are part of its plan


def changed(name, t):
    """Return other valid values of the tensor `name`, in its shape."""
    if name in ("cu_seqlens_q", "cu_seqlens_k"):
        return torch.cat((t[:1], t[1:-1] + 1, t[-1:]))
    if name in ("q_lengths", "kv_lengths"):
        return t.flip(0) - 1
    return ~t if t.dtype == torch.bool else t.flip(*range(t.ndim))


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "block_table"])  # over HTTP: caches
def test_a_second_call_with_other_values_has_their_answer(server, entry):
    tensors, options, direction = problem(entry)
    others = {name: changed(name, t) for name, t in tensors.items()}
    if "o" in tensors:  # they must be those of q, k and v
        others |= solve({n: others[n] for n in "qkv"}, {**options, "return_lse": True}, "forward")
    second = {n: OTHER_OPTIONS.get(n, lambda value: value)(value) for n, value in options.items()}
    bits = []
    for given, chosen in ((tensors, options), (others, second), (tensors, options)):
        actual = post(server, PATHS[direction], message(given, **chosen)).tensors
        for name, expected in solve(given, chosen, direction).items():
            torch.testing.assert_close(actual[name], expected, rtol=1e-3, atol=1e-4)
        bits.append({name: t.numpy().tobytes() for name, t in actual.items()})
    assert bits[0] == bits[2]
    assert bits[0] != bits[1]
