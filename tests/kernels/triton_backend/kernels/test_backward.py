"""Gradients in Triton equal their closed forms, and are 0 where no key is visible."""

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from tests.conftest import DEVICE
from tests.support.kernels.triton_cases import PLAIN, tensors_of


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=["no-batch", "no-queries", "no-keys"])
def test_nothing_to_attend_to(shape: tuple[int, int, int, int], direction: str) -> None:
    """If B, Sq or Sk is 0, all gradients are 0. If Sk is 0, o is 0 and lse is the sink."""
    b, h, q_len, kv_len = shape
    tensors = {n: torch.ones((b, h, s, 16), device=DEVICE) for n, s in (("q", q_len), ("k", kv_len), ("v", kv_len))}
    tensors["sinks"] = torch.tensor([0.5, -1.0], device=DEVICE)
    tensors["attn_mask"] = torch.zeros((1, kv_len), device=DEVICE)
    if direction == "backward":
        tensors["do"] = torch.ones((b, h, q_len, 16), device=DEVICE)
    grads = ("dq", "dk", "dv", "dattn_mask", "dsinks")
    problem = Problem.create(tensors, Options(return_lse=True, grads=grads), direction)
    for t in problem.outputs.values():
        t.fill_(float("nan"))
    run([problem], "triton")
    for name, t in problem.outputs.items():
        if name == "lse" and not kv_len:
            assert torch.equal(t, tensors["sinks"][None, :, None].expand_as(t))
        elif name != "lse" and not (name in ("o",) and kv_len):
            assert torch.equal(t, torch.zeros_like(t)), name


def test_rows_that_see_nothing_and_padding() -> None:
    """Fully masked rows, kv_lengths of 0 and padding give o 0, lse −inf, zero gradients; padding is never read."""
    case = PLAIN | {"lengths": True}
    tensors = tensors_of(case, 12, 9)
    tensors["q_lengths"], tensors["kv_lengths"] = torch.tensor([12, 7]), torch.tensor([0, 4])
    tensors["attn_mask"] = torch.ones((2, 1, 12, 9), dtype=torch.bool, device=DEVICE)
    tensors["attn_mask"][1, :, 3] = False
    for name in ("q", "do"):
        tensors[name][1, :, 7:] = float("nan")
    for name in ("k", "v"):
        tensors[name][0], tensors[name][1, :, 4:] = float("nan"), float("nan")
    forward = Problem.create({n: t for n, t in tensors.items() if n != "do"}, Options(return_lse=True))
    run([forward], "triton")
    backward = Problem.create({**tensors, **forward.outputs}, Options(), "backward")
    run([backward], "triton")
    o, lse = forward.outputs["o"], forward.outputs["lse"]
    for seen in (o[0], o[1, :, 3], o[1, :, 7:], backward.outputs["dq"][0], backward.outputs["dk"][0]):
        assert torch.equal(seen, torch.zeros_like(seen))
    for seen in (lse[0], lse[1, :, 3], lse[1, :, 7:]):
        assert torch.equal(seen, torch.full_like(seen, float("-inf")))
    assert not any(t.isnan().any() for t in (*forward.outputs.values(), *backward.outputs.values()))
    assert o[1, :, :3].abs().min() > 0


def test_closed_forms() -> None:
    """q = k = 0 gives the mean of v and ln Sk; one key gives dv = Σ do and dq = dk = 0; a loss of lse alone, dv = 0."""
    g = torch.Generator().manual_seed(4)
    v, do = (torch.randn((1, 1, s, 16), generator=g).to(DEVICE) for s in (50, 9))
    zero = {"q": torch.zeros(1, 1, 9, 16, device=DEVICE), "k": torch.zeros(1, 1, 50, 16, device=DEVICE), "v": v}
    mean = Problem.create(zero, Options(return_lse=True))
    run([mean], "triton")
    torch.testing.assert_close(mean.outputs["o"], v.mean(2, keepdim=True).expand(1, 1, 9, 16), rtol=0, atol=1e-6)
    torch.testing.assert_close(mean.outputs["lse"], torch.full((1, 1, 9), 50.0, device=DEVICE).log(), rtol=0, atol=1e-6)
    lone = {"q": do, "k": v[:, :, :1], "v": v[:, :, :1], "do": do}
    one = Problem.create(lone, Options(), "backward")
    run([one], "triton")
    torch.testing.assert_close(one.outputs["dv"], do.sum(2, keepdim=True), rtol=0, atol=1e-5)
    for name in ("dq", "dk"):
        torch.testing.assert_close(one.outputs[name], torch.zeros_like(one.outputs[name]), rtol=0, atol=2e-5)
    lse_only = {**zero, "do": torch.zeros_like(do), "dlse": torch.ones((1, 1, 9), device=DEVICE)}
    loss = Problem.create(lse_only, Options(), "backward")
    run([loss], "triton")
    assert torch.equal(loss.outputs["dv"], torch.zeros_like(v))
