"""The seed of a case determines its tensors. For kinds of values in EXACT, each data type represents scores exactly."""

import pytest
import torch

from flashpoint_kernels.judging.cases import TYPES, Case
from flashpoint_kernels.judging.values import EXACT, KINDS, draw
from flashpoint_kernels.problems.problem import DTYPES


def case_of(values: str, dtype: str = "float32", **more: object) -> Case:
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 70, "head_dim": 16, "value_dim": 24}
    return Case(values=values, dtype=dtype, **(sizes | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("values", KINDS)
def test_a_case_has_finite_tensors_of_its_sizes_that_its_seed_repeats(values: str, dtype: str) -> None:
    case = case_of(values, dtype)
    t = draw(case)
    assert {name: tuple(x.shape) for name, x in t.items()} == {
        "q": (2, 4, 9, 16), "k": (2, 2, 70, 16), "v": (2, 2, 70, 24), "do": (2, 4, 9, 24),
    }  # fmt: skip
    assert {x.dtype for x in t.values()} == {DTYPES[dtype]}
    assert all(x.isfinite().all() for x in t.values())
    assert all(torch.equal(x, t[name]) for name, x in draw(case).items())
    assert not torch.equal(draw(case_of(values, dtype, seed=1))["v"], t["v"])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("values", EXACT)
def test_the_scores_of_exact_kinds_need_no_rounding(values: str, dtype: str) -> None:
    t = {name: x.double() for name, x in draw(case_of(values, dtype)).items()}
    raw = t["q"] @ t["k"].repeat_interleave(2, 1).mT
    for scores in (raw, raw * 16**-0.5):
        assert torch.equal(scores.to(DTYPES[dtype]).double(), scores)


def test_the_other_tensors_of_a_case_belong_to_it() -> None:
    extras = ("alibi_slopes", "sinks", "kv_lengths")
    t = draw(case_of("normal", mask="float-keys", extras=extras))
    assert t["attn_mask"].shape == (2, 1, 1, 70)
    assert t["attn_mask"][..., 0].isfinite().all(), "every row sees a key"
    assert t["alibi_slopes"].shape == t["sinks"].shape == (4,)
    assert ((t["kv_lengths"] >= 1) & (t["kv_lengths"] <= 70)).all()
    assert draw(case_of("normal", mask="bool-heads"))["attn_mask"].shape == (1, 4, 9, 70)
