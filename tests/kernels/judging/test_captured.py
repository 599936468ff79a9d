"""The judge locates and explains errors in answers that another program computed and saved."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashpoint_kernels import Options, verify
from tests.support.covering import cover
from tests.support.kernels.solving import forward, qkv
from tests.support.kernels.verified import errors_of, sdpa


def test_wrong_answers_say_where_and_why() -> None:
    t = qkv(2, 4, 20, 36, 16)
    right = forward("tiled", t)
    right["o"][1, 2, 16:] = 0.0
    (o,) = verify(t, answers={"o": right["o"]}).tensors
    assert o.where.startswith("64 of 2560 elements; sequence 1 (the last) of 2; head 2 of 4; rows 16 to 19")
    report = verify(t, Options(causal=True), answers=forward("tiled", t, causal=True, causal_alignment="top_left"))
    assert report.causes[0].code == "causal-alignment"
    assert report.causes[0].confirmed
    packed = {n: x.transpose(1, 2).flatten(0, 1).contiguous() for n, x in t.items()}
    packed |= {"cu_seqlens_q": torch.tensor([0, 13, 40]), "cu_seqlens_k": torch.tensor([0, 30, 72])}
    answers = forward("tiled", {n: x for n, x in packed.items() if n != "do"}, layout="thd", scale=1.0)
    report = verify({n: x for n, x in packed.items() if n != "do"}, Options(layout="thd"), answers=answers)
    assert report.causes[0].code.startswith("scale")


@pytest.mark.parametrize("length", [4, 16])
def test_an_answer_that_nobody_wrote_is_not_explained_by_small_numbers(length: int) -> None:
    """An o of exact zeros is not explained by padding keys that count in the softmax, which give an o of almost 0."""
    t = {n: x for n, x in qkv(1, 2, length, length, 8).items() if n != "do"}
    report = verify(t, Options(causal=True), answers={"o": torch.zeros_like(t["v"])})
    assert [(cause.code, cause.text) for cause in report.causes] == [
        ("zero-rows", f"o is 0 in {length} of {length} rows")
    ]


@cover(dtype=[torch.float32, torch.float16], name=["o", "dq", "dk", "dv"])
def test_an_element_off_by_a_hundredth_is_located(dtype: torch.dtype, name: str) -> None:
    t = qkv(1, 4, 64, 64, 32, dtype=dtype)
    answers = sdpa(t, SDPBackend.MATH)
    answers[name][0, 3, 41, 7] += 1e-2
    errors = {e.name: e for e in verify(t, answers=answers).tensors}
    assert [n for n, e in errors.items() if not e.ok or e.imprecise] == [name]
    assert errors[name].worst_index == (0, 3, 41, 7)
    assert errors[name].histogram[-1].count == 1
    assert errors[name].histogram[-1].exponent in (-3, -2)  # rounding may reduce the error a little
    assert errors[name].torch.max_abs < 2e-3  # the errors of torch's own attention do not contain the mistake


def test_a_wrong_causal_alignment_is_located() -> None:
    """With more keys than queries, torch's top-left is_causal shows each row fewer keys than bottom right does."""
    t = qkv(1, 2, 32, 48, 32)
    answers = sdpa(t, SDPBackend.MATH, is_causal=True)
    assert verify(t, Options(causal=True, causal_alignment="top_left"), answers=answers).ok
    report = verify(t, Options(causal=True), answers=answers)
    assert errors_of(report) == dict.fromkeys(answers, False)
    o = report.tensors[0]
    assert o.max_rel > 0.1
    assert o.worst_index is not None
    assert o.worst_index[2] < 8  # the first rows see few keys instead of 17 or more


def test_a_missing_scale_is_caught() -> None:
    t = qkv(1, 2, 64, 64, 32)
    report = verify(t, answers=sdpa(t, SDPBackend.MATH, scale=1.0))
    assert errors_of(report) == {"o": False, "dq": False, "dk": False, "dv": False}
    assert report.tensors[0].cosine < 0.9
