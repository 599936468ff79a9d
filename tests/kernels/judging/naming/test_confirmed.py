"""A cause is confirmed only if it explains what fails and nothing that passes; a report repeats its failure."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

import flashpoint_kernels
from tests.judge.right import formula_in_float32

ONE = {"q_len": 40, "kv_len": 150, "head_dim": 16}


def judged(function: Any, **more: Any) -> Any:
    given = {"quick": True, "only": ONE, "dtype": "float32", "device": "cpu", "seed": 5} | more
    return flashpoint_kernels.judge(function, **given)


def lse_of_first_rows(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = True) -> Any:
    """o is right; lse misses the first 64 keys."""
    o = formula_in_float32(q, k, v)
    if not return_lse:
        return o
    return o, (q @ k[:, :, 64:].mT * q.shape[-1] ** -0.5).logsumexp(-1)


def test_a_wrong_lse_alone_names_no_mistake_of_o() -> None:
    report = judged(lse_of_first_rows)
    (cause,) = report.causes
    assert (report.verdict, cause.code, cause.confirmed) == ("wrong", "unknown", False)
    assert cause.text.startswith("lse is wrong")
    assert report.lines()[1].startswith("cause: ")
    assert report.lines()[2].startswith("smallest failing case: ")


def first_tile_for_large(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first 64 keys are ignored, but for large values alone."""
    if float(q.abs().max()) < 8 or k.shape[2] <= 64:
        return formula_in_float32(q, k, v)
    return formula_in_float32(q, k[:, :, 64:], v[:, :, 64:])


def test_a_mistake_that_predicts_errors_where_the_function_is_right_is_not_named() -> None:
    report = judged(first_tile_for_large)
    assert report.verdict == "wrong"
    assert "first-tile" not in [cause.code for cause in report.causes if cause.confirmed]


def first_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return formula_in_float32(q, k[:, :, 64:], v[:, :, 64:]) if k.shape[2] > 64 else formula_in_float32(q, k, v)


def test_a_mistake_that_explains_all_is_confirmed() -> None:
    (cause,) = judged(first_tile).causes
    assert (cause.code, cause.confirmed) == ("first-tile", True)


def unwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last, partial tile of 16 rows is never written."""
    o = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    whole = q.shape[2] // 16 * 16
    o[:, :, :whole] = formula_in_float32(q[:, :, :whole], k, v)
    return o


@pytest.mark.slow
def test_memory_that_is_not_written_is_named() -> None:
    report = judged(unwritten)
    assert [(cause.code, cause.confirmed) for cause in report.causes] == [("uninitialised", True)]


def beyond(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One key beyond the end of each tensor counts a little: what lies there is read."""
    o = formula_in_float32(q, k, v)
    end = k.storage_offset() + sum((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True)) + 1
    if end < k.untyped_storage().nbytes() // k.element_size():
        o = o + 0.0 * torch.as_strided(k.detach(), (1,), (1,), end)
    return o


@pytest.mark.slow
def test_a_read_beyond_the_end_is_not_named_after_strides_or_offsets() -> None:
    report = judged(beyond, only=None)
    assert [cause.code for cause in report.causes] == ["out-of-bounds"], report.lines()


def killed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return q


def test_a_process_that_is_killed_does_not_confirm_a_lack_of_memory() -> None:
    (cause,) = judged(killed).causes
    assert (cause.code, cause.confirmed) == ("killed", False)


def shape_of_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


def test_the_hint_for_a_wrong_shape_is_no_mistake() -> None:
    report = judged(shape_of_q, only=ONE | {"value_dim": 32})
    cause = report.causes[0]
    assert cause.code == "answer-form"
    assert cause.advice == "o has q's type and shape, but v's last dimension"


def ignores_strides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [torch.as_strided(t.detach(), t.shape, torch.empty(t.shape).stride(), t.storage_offset()) for t in (q, k, v)]
    return formula_in_float32(*flat)


_CALLS = [0]


def differs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Is wrong from the 30th call on."""
    _CALLS[0] += 1
    return formula_in_float32(q, k, v) * (math.nan if _CALLS[0] > 30 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "word"), [(ignores_strides, '"memory"'), (differs, "--seed 5")])
def test_the_command_repeats_a_failure_with_its_memory_form_or_its_calls(function: Any, word: str) -> None:
    report = judged(function, only=None)
    assert report.verdict == "wrong"
    assert word in report.command
    words = shlex.split(report.command)
    if "--case" in words:
        again = judged(function, only=json.loads(words[words.index("--case") + 1]))
        assert again.verdict == "wrong", again.lines()
