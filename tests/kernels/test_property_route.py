"""Random series of calls, which reuse the cached routes of route.py, have the answers of calls without a cache."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import attention
from tests.conftest import DEVICE
from tests.support.kernels.routes import forget
from tests.support.kernels.solving import normal

calls = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["bhsd", "bshd"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "batch": st.integers(1, 2),
        "group": st.sampled_from([1, 2]),
        "q_len": st.sampled_from([1, 3, 9]),
        "kv_len": st.integers(1, 70),
        "stride": st.sampled_from(["plain", "cache", "odd"]),
        "lengths": st.booleans(),
        "mask": st.booleans(),
        "gradient": st.booleans(),
        "options": st.fixed_dictionaries(
            {},
            optional={
                "causal": st.booleans(),
                "window": st.sampled_from([(-1, -1), (7, 2)]),
                "softcap": st.sampled_from([0.0, 2.0]),
                "scale": st.sampled_from([0.1, -0.5]),
                "return_lse": st.booleans(),
                "dropout": st.integers(0, 1 << 63),
            },
        ),
    }
)


def placed(shape: tuple[int, ...], how: str, rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return normal random numbers in separate memory, in the first rows of a longer cache, or at an odd address."""
    t = normal(*shape, seed=seed).to(dtype)
    if how == "cache":
        longer = list(shape)
        longer[rows] += 13
        rows_view = torch.full(longer, float("nan"), dtype=dtype, device=DEVICE).narrow(rows, 0, shape[rows])
        return rows_view.copy_(t)
    return torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(shape) if how == "odd" else t


def answer(case: dict[str, Any], seed: int) -> list[Tensor]:
    """Call `attention` with the options of `case` and random tensors, and return its answers and gradients."""
    options = dict(case["options"])
    if (key := options.pop("dropout", None)) is not None:
        options |= {"dropout_p": 0.3, "dropout_seed": key}
    rows = 2 if case["layout"] == "bhsd" else 1

    def tensor(heads: int, length: int, which: int) -> Tensor:
        sizes = (heads, length) if rows == 2 else (length, heads)
        return placed((case["batch"], *sizes, 16), case["stride"], rows, seed + which, case["dtype"])

    q, k, v = tensor(2 * case["group"], case["q_len"], 0), *(tensor(2, case["kv_len"], n) for n in (1, 2))
    extra: dict[str, Tensor] = {}
    if case["lengths"]:
        extra["kv_lengths"] = torch.arange(case["batch"]) % (case["kv_len"] + 1)
    if case["mask"]:
        extra["attn_mask"] = normal(case["q_len"], case["kv_len"], seed=seed).to(case["dtype"])
    if case["gradient"]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    actual = attention(q, k, v, layout=case["layout"], backend="triton", **extra, **options)
    answers = list(actual) if isinstance(actual, tuple) else [actual]
    if case["gradient"]:
        answers += torch.autograd.grad(answers[0].float().sum(), (q, k, v))
    return answers


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.lists(calls, min_size=2, max_size=3))
def test_a_call_after_any_others_has_the_answers_of_a_first_call(cases: list[dict[str, Any]]) -> None:
    """Each call runs twice with different numbers, and both runs have the bits of a call with empty caches."""
    warm = [answer(case, seed) for seed in (0, 50) for case in cases]
    for actual, (seed, case) in zip(warm, [(seed, case) for seed in (0, 50) for case in cases], strict=True):
        forget()
        assert all(torch.equal(a, b) for a, b in zip(actual, answer(case, seed), strict=True))
