"""`verify` passes answers that are exact up to rounding, detects wrong ones, and reports their positions."""

import json
import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashpoint_kernels import Options, ProblemError, verify
from flashpoint_kernels.reference_backend import formula
from flashpoint_kernels.verification import Progress
from tests.conftest import DEVICE
from tests.support.covering import cover
from tests.support.kernels.solving import backward, forward, normal, qkv
from tests.support.kernels.verified import errors_of, sdpa, told


def test_names_what_it_judged_and_who_ran() -> None:
    t = qkv(1, 2, 20, 30, 16) | {"attn_mask": normal(2, 1, 30), "sinks": normal(2)}
    report = verify(t, Options(grads=["dq", "dattn_mask", "dsinks"]))  # type: ignore[arg-type]
    assert report.backend == ("cpu" if DEVICE == "cpu" else "triton")  # chosen by `auto`
    assert errors_of(report) == dict.fromkeys(["o", "lse", "dq", "dattn_mask", "dsinks"], True)
    assert errors_of(verify({name: x for name, x in t.items() if name != "do"})) == {"o": True, "lse": True}
    with pytest.raises(FrozenInstanceError):
        report.ok = False  # type: ignore[misc]


def test_is_plain_data() -> None:
    data = verify(qkv(1, 1, 3, 4, 8)).to_dict()
    assert json.loads(json.dumps(data))["tensors"][0].keys() == {
        "name", "max_abs", "max_rel", "rms", "cosine", "worst_index", "worst_value", "worst_expected", "bound", "rule",
        "ok", "torch", "histogram", "excess", "imprecise", "where",
    }  # fmt: skip


@cover(dtype=[torch.float32, torch.float16, torch.bfloat16], name=["o", "lse", "dq", "dk", "dv"])
def test_one_wrong_value_is_found(dtype: torch.dtype, name: str) -> None:
    t = qkv(2, 2, 20, 30, 16, dtype=dtype)
    answers = forward("tiled", t)
    answers |= backward("tiled", t | answers)
    assert all(errors_of(verify(t, answers=answers)).values())
    at = (1, 0, 7) if name == "lse" else (1, 0, 7, 3)
    answers[name][at] += 0.25
    report = verify(t, answers=answers)
    assert report.backend == "given"
    assert not report.ok
    assert errors_of(report) == {n: n != name for n in answers}
    (wrong,) = (e for e in report.tensors if not e.ok)
    assert wrong.worst_index == at
    assert wrong.worst_value == float(answers[name][at])
    assert wrong.max_abs == abs(wrong.worst_value - wrong.worst_expected) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found(value: float) -> None:
    t = qkv(1, 1, 5, 6, 8)
    o = forward("tiled", t)["o"]
    o[0, 0, 2, 1] = value
    report = verify(t, answers={"o": o})
    assert not report.ok
    assert report.tensors[0].max_abs == math.inf
    assert report.tensors[0].worst_index == (0, 0, 2, 1)


def test_the_numbers_are_what_they_say() -> None:
    t = qkv(1, 1, 5, 6, 8)
    exact = forward("reference", {name: x.double() for name, x in t.items()})["o"]
    o = exact.float()
    o[0, 0, 0] *= 1.5
    (error,) = verify(t, answers={"o": o}).tensors
    difference = o.double() - exact
    assert error.max_abs == pytest.approx(float(difference.abs().max()), rel=1e-9)
    assert error.max_rel == pytest.approx(float(difference.abs().max() / exact.abs().max()), rel=1e-9)
    assert error.rms == pytest.approx(float(difference.square().mean().sqrt()), rel=1e-9)
    cosine = torch.nn.functional.cosine_similarity(o.double().flatten(), exact.flatten(), dim=0)
    assert error.cosine == pytest.approx(float(cosine), rel=1e-9)


def test_float32_has_the_reference_pages_bound() -> None:
    errors = {e.name: e for e in verify(qkv(1, 2, 300, 400, 32), Options(backend="tiled")).tensors}
    assert errors["dq"].bound == pytest.approx(2e-6 * errors["dq"].max_abs / errors["dq"].max_rel)
    assert errors["dq"].rule == "2e-06 of the largest value"
    wide = {e.name: e for e in verify(qkv(1, 2, 100, 100, 64), Options(backend="tiled")).tensors}
    assert wide["o"].rule == "5e-06 of the largest value"


def test_float32_has_torchs_error_where_torch_itself_misses_the_bound() -> None:
    """ALiBi at distances up to 798 gives scores whose rounding exceeds 5e-6: the bound is twice torch's own error."""
    t = qkv(1, 2, 799, 3, 16) | {"alibi_slopes": torch.tensor([0.9, 0.7], device=DEVICE)}
    (o,) = (e for e in verify(t, Options(backend="tiled")).tensors if e.name == "o")
    assert o.torch.max_abs > 5e-6 * o.max_abs / o.max_rel
    assert o.bound == 2 * o.torch.max_abs
    assert o.ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_twice_and_thrice_torchs_error(dtype: torch.dtype) -> None:
    errors = {e.name: e for e in verify(qkv(2, 4, 100, 128, 64, dtype=dtype), Options(backend="tiled")).tensors}
    assert errors["o"].bound == 2 * errors["o"].torch.max_abs + 1e-5
    assert errors["dv"].bound == 3 * errors["dv"].torch.max_abs + 1e-5
    assert errors["lse"].max_abs < 1e-5  # always float32


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_float64_has_a_bound_of_its_own_but_for_lse(backend: str) -> None:
    t = qkv(1, 2, 40, 50, 16, dtype=torch.float64)
    report = verify(t, Options(backend=backend))
    assert report.ok
    rules = {e.name: e.rule for e in report.tensors}
    assert rules.pop("lse") == "2e-06 of the largest value"  # always float32
    assert rules == dict.fromkeys(["o", "dq", "dk", "dv"], "1e-12 of the largest value")
    o = forward("reference", t)["o"]
    o[0, 1, 7, 3] += 1e-9
    assert not verify(t, answers={"o": o}).ok


def test_empty_and_masked_problems_pass() -> None:
    assert verify(qkv(0, 1, 3, 4, 8)).ok
    assert verify(qkv(1, 1, 3, 0, 8)).ok
    report = verify(qkv(1, 1, 3, 4, 8) | {"kv_lengths": torch.tensor([0])})
    assert report.ok
    assert {e.max_abs for e in report.tensors} == {0.0}


def test_dropout_answers_are_judged_with_their_seed() -> None:
    t = {name: x for name, x in qkv(1, 2, 20, 30, 16).items() if name != "do"}
    assert verify(t, Options(dropout_p=0.3)).ok  # the answers and float64 use one drawn seed
    o = forward("tiled", t, dropout_p=0.3, dropout_seed=4)["o"]
    assert verify(t, Options(dropout_p=0.3, dropout_seed=4), answers={"o": o}).ok
    assert not verify(t, Options(dropout_p=0.3, dropout_seed=5), answers={"o": o}).ok
    with pytest.raises(ProblemError, match="dropout_seed"):
        verify(t, Options(dropout_p=0.3), answers={"o": o})


def test_answers_that_do_not_belong_are_refused() -> None:
    t = {name: x for name, x in qkv(1, 2, 20, 30, 16).items() if name != "do"}
    with pytest.raises(ProblemError) as refused:
        verify(t, answers={"o": normal(1, 2, 20, 15), "dq": t["q"]})
    assert [name for name, _ in refused.value.errors] == ["o", "dq"]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("attn_maks", r"did you mean attn_mask\?"), ("mine", "known are q, .*, and as answers o, lse, dq"), ("dq", "")],
)
def test_a_tensor_of_an_unknown_name_is_refused(gradients: bool, name: str, hint: str) -> None:
    t = {n: x for n, x in qkv(1, 2, 20, 20, 16).items() if gradients or n != "do"}
    with pytest.raises(ProblemError, match=rf"^{name}: unknown tensor; {hint}"):
        verify(t | {name: t["q"]})


@pytest.mark.parametrize("name", ["o", "lse", "dlse"])
def test_what_a_gradient_alone_takes_is_refused_without_do(name: str) -> None:
    t = {n: x for n, x in qkv(1, 2, 20, 20, 16).items() if n != "do"}
    with pytest.raises(ProblemError, match=rf"^{name}: needs do"):
        verify(t | {name: normal(1, 2, 20)})


def test_the_callers_o_and_lse_are_what_the_gradient_is_made_from() -> None:
    """A gradient request may contain o and lse: wrong ones give wrong gradients, which `verify` reports."""
    t = qkv(1, 2, 20, 30, 16)
    saved = forward("tiled", t)
    assert verify(t | saved, Options(backend="tiled")).ok
    wrong = errors_of(verify(t | saved | {"lse": saved["lse"] + 0.1}, Options(backend="tiled")))
    assert wrong == {"o": True, "lse": True, "dq": False, "dk": False, "dv": False}


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may have other kernels of torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_attention_passes(dtype: torch.dtype, backend: SDPBackend, causal: bool) -> None:
    t = qkv(1, 4, 64, 64, 32, dtype=dtype)
    assert verify(t, Options(causal=causal), answers=sdpa(t, backend, is_causal=causal)).ok


def test_the_histogram_counts_every_element_by_decade() -> None:
    t = qkv(1, 1, 5, 6, 8)
    exact = forward("reference", {name: x.double() for name, x in t.items()})["o"]
    o = exact.clone().float().double()
    o[0, 0, 0, :3] = exact[0, 0, 0, :3] + torch.tensor([0.5, 0.05, 50.0]).to(exact)
    o[0, 0, 1, 0] = math.nan
    histogram = {d.exponent: d.count for d in verify(t, answers={"o": o}).tensors[0].histogram}
    assert sum(histogram.values()) == o.numel()
    assert [histogram[n] for n in (-2, -1, 1, 309)] == [1, 1, 1, 1]
    assert max(n for n in histogram if n is not None and n < -2) <= -8  # the rounding of o to float32


def test_torchs_figures_are_of_the_same_problem_in_its_dtype() -> None:
    t = qkv(1, 2, 40, 50, 16, dtype=torch.bfloat16)
    report = verify(t, answers=sdpa(t, SDPBackend.MATH))
    for e in report.tensors:
        assert 0 < e.torch.rms < e.torch.max_abs < 0.1
        assert 0.999 < e.torch.cosine <= 1
        assert e.torch.worst_index is not None
        assert abs(e.torch.worst_value - e.torch.worst_expected) == e.torch.max_abs  # type: ignore[operator]


def test_progress_counts_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formula, "CHUNK", 2 * 30 * 8)  # scores: 8 of 20 queries at a time, so 3 blocks
    report, events = told(qkv(1, 2, 20, 30, 16))
    assert report.ok
    both = [("backend", way) for way in ("forward", "backward")]
    blocks = [(stage, way) for way in ("forward", "backward") for stage in ("float64", "torch") for _ in range(3)]
    assert [at[2:] for at in events] == both + blocks
    assert [at[:2] for at in events] == [(n, 14) for n in range(14)]


def test_what_progress_raises_ends_the_verification() -> None:
    def stop(at: Progress) -> None:
        if at.stage == "torch":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        verify(qkv(1, 1, 3, 4, 8), progress=stop)
