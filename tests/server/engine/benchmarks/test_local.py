"""The contract's schemas fit the results and presets of the kernels; one seed draws the same problem in every dtype."""

import dataclasses
from typing import get_args

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint import BenchmarkRow, VerifyReport, VerifyRequest
from flashpoint_contract.schemas.benchmark import Preset, TimedDtype
from flashpoint_contract.schemas.verify import Decade, Judgement, TensorErrors
from flashpoint_kernels import verification
from flashpoint_kernels.timing import PRESETS, ROW_FIELDS
from flashpoint_kernels.timing.case import DTYPES
from flashpoint_server.engine.benchmarks.local import draw


def test_the_schemas_are_the_kernels_own():
    assert tuple(BenchmarkRow.model_fields) == ROW_FIELDS
    assert set(get_args(Preset)) == set(PRESETS)
    assert set(get_args(TimedDtype)) == set(DTYPES)
    for ours, theirs in (
        (TensorErrors, verification.TensorErrors),
        (Decade, verification.Decade),
        (Judgement, verification.Judgement),
    ):
        assert set(ours.model_fields) == {field.name for field in dataclasses.fields(theirs)}
    assert {field.name for field in dataclasses.fields(verification.Verification)} <= set(VerifyReport.model_fields)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_seed_draws_the_same_problem_in_every_dtype_but_for_rounding(dtype):
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 7, "head_dim": 3, "value_dim": 6}
    body = {"shape": shape, "extras": ["sinks", "q_lengths"], "seed": 11}
    exact = draw(VerifyRequest.model_validate(body | {"dtype": "float64"}), "cpu")
    drawn = draw(VerifyRequest.model_validate(body | {"dtype": dtype}), "cpu")
    assert {name: tuple(t.shape) for name, t in drawn.items()} == {
        "q": (2, 4, 5, 3), "k": (2, 2, 7, 3), "v": (2, 2, 7, 6), "do": (2, 4, 5, 6), "sinks": (4,), "q_lengths": (2,),
    }  # fmt: skip
    assert all(torch.equal(t, exact[name].to(t.dtype)) for name, t in drawn.items())
    assert drawn["q"].dtype == getattr(torch, dtype)
    assert not torch.equal(draw(VerifyRequest.model_validate(body | {"seed": 12}), "cpu")["q"], exact["q"])
