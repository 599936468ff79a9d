"""The bounds of errors allow the rounding of each data type, and no larger error."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashpoint_kernels import Options, verify
from flashpoint_kernels.judging.exact import bounds
from flashpoint_kernels.reference_backend import formula
from tests.support.kernels.solving import backward, forward, qkv
from tests.support.kernels.verified import sdpa, told


@pytest.mark.parametrize(("off", "ok"), [(0.0, True), (1e-7, True), (1e-4, False)])
def test_what_cancels_is_forgiven_its_rounding(off: float, ok: bool) -> None:
    """With one key, the exact dq is 0, and its bound allows errors as large as the rounding of rowsum(o∘do)."""
    t = qkv(1, 1, 6, 1, 16)
    (dq,) = verify(t, answers={"dq": torch.full_like(t["q"], off)}).tensors
    assert dq.rule == "the rounding of float32, element by element"
    assert (dq.ok, dq.excess <= 1) == (ok, ok)
    assert dq.bound > 0


def test_a_backend_is_forgiven_the_rounding_of_what_cancels() -> None:
    """With one key and values of about 1000, the bound of `tiled`'s dq allows the rounding of rowsum(o∘do).

    torch's own dq may be exact here by chance, so the bound must not come from torch's error alone.
    """
    t = qkv(1, 1, 6, 1, 16)
    t["v"] *= 1000
    errors = {e.name: e for e in verify(t, Options(backend="tiled")).tensors}
    assert errors["dq"].ok
    assert errors["dq"].rule in ("the rounding of rowsum(o*do)", "2e-06 of the largest value")


def test_errors_between_the_bounds_are_imprecise() -> None:
    """Attention with all arithmetic in bfloat16, where scores have errors of some tenths, is judged imprecise."""
    t = qkv(1, 2, 40, 50, 64, dtype=torch.bfloat16)
    t["q"] *= 8
    errors = {e.name: e for e in verify(t, answers=sdpa(t, SDPBackend.MATH)).tensors}
    rounded = (t["q"] @ t["k"].mT * 64**-0.5).softmax(-1) @ t["v"]
    (o,) = verify({n: t[n] for n in "qkv"}, answers={"o": rounded}).tensors
    assert (o.ok, o.imprecise, o.where) == (True, True, "")
    assert errors["o"].ok


def test_tf32_that_cuts_its_factors_is_right_where_it_is_allowed() -> None:
    """Products of inputs truncated to TF32, with errors near 2⁻¹⁰ that add up, are right with precision="tf32"."""

    def cut(t: torch.Tensor) -> torch.Tensor:
        return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    shapes = {"q": (1, 2, 40, 4), "k": (1, 2, 50, 4), "v": (1, 2, 50, 4)}
    t = {
        name: ((1 + torch.rand(shape) / 64).view(torch.int32) | 0x1FFF).view(torch.float32)
        for name, shape in shapes.items()
    }
    s = cut(t["q"]) @ cut(t["k"]).mT / 2
    answers = {"o": cut(s.softmax(-1)) @ cut(t["v"]), "lse": s.logsumexp(-1)}
    allowed = verify(t, Options(precision="tf32"), answers=answers)
    assert allowed.ok, allowed
    assert not verify(t, answers=answers).ok
    assert (
        verify(t, Options(precision="tf32", backend="tiled")).tensors[0].rule
        == "the rounding of TF32, element by element"
    )


def test_progress_of_given_answers_counts_what_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (formula, bounds):
        monkeypatch.setattr(module, "CHUNK", 2 * 30 * 8)
    t = qkv(1, 2, 20, 30, 16)
    _, events = told(t, answers=forward("tiled", t))
    assert [at[0] for at in events] == list(range(6))
    assert {at[1:] for at in events} == {(6, "float64", "forward"), (6, "torch", "forward")}
    wrong = {name: x + 1 for name, x in backward("tiled", t | forward("tiled", t)).items()}
    report, events = told(t, answers=wrong)
    assert not report.ok
    assert [at[0] for at in events] == list(range(len(events)))
    assert {(at[1], at[2]) for at in events[:6]} == {(6, "float64"), (6, "torch")}
    assert {at[2] for at in events[6:]} == {"causes"}
