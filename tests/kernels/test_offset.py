"""`offset` moves the diagonal of each sequence; plans and kernels do not depend on its values.

The cases of `triton_cases` combine `offset` with each other option; test_one_row.py and test_short_sequences.py test
whether answers with `offset` have the same bits.
"""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_contract import spec as specs
from flashpoint_kernels import ProblemError, attention
from flashpoint_kernels.triton_backend.host import route
from tests.support.kernels.routes import forget
from tests.support.kernels.solving import normal, qkv

BACKENDS = ("reference", "tiled", "cpu", "triton")
FAR = 1 << 29
Q, K = normal(2, 2, 3, 8), normal(2, 2, 5, 8, seed=1)


def formula(
    q: Tensor, k: Tensor, v: Tensor, offsets: list[int], slopes: Tensor | None, causal: bool, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return o and lse in float64 by the contract: j <= i + offset, the window, and −slope·|i + offset − j|."""
    queries = torch.arange(q.shape[2], device=q.device)[:, None]
    at = queries + torch.tensor(offsets, device=q.device)[:, None, None, None]
    ahead = torch.arange(k.shape[2], device=q.device) - at
    s = q @ k.mT / q.shape[-1] ** 0.5
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * ahead.abs()
    left, right = window
    hidden = ((ahead > 0) & causal) | ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
    s = s.masked_fill(hidden, -torch.inf)
    dead = hidden.all(-1, keepdim=True)
    p = s.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return p @ v, s.logsumexp(-1)


@pytest.mark.parametrize("backend", [pytest.param(b, marks=[pytest.mark.slow] * (b == "triton")) for b in BACKENDS])
@given(
    lengths=st.tuples(st.sampled_from([1, 3, 20, 70]), st.sampled_from([1, 5, 33, 130])),
    offsets=st.lists(st.one_of(st.integers(-30, 160), st.sampled_from([-FAR, FAR])), min_size=2, max_size=2),
    one=st.booleans(), causal=st.booleans(), window=st.sampled_from([(-1, -1), (5, -1), (-1, 3), (0, 0), (20, 4)]),
    alibi=st.booleans(),
)  # fmt: skip
@example((20, 33), [0, 7], False, True, (-1, -1), False)
@settings(max_examples=12, deadline=None)
def test_it_moves_causality_windows_and_alibi(
    backend: str, lengths: tuple[int, int], offsets: list[int], one: bool, causal: bool, window: tuple[int, int],
    alibi: bool,
) -> None:  # fmt: skip
    """Causality, windows and ALiBi with one offset, or one per sequence, equal float64, forward and gradients."""
    t = {name: x.requires_grad_() for name, x in qkv(2, 2, *lengths, 16).items()}
    q, k, v, do = (t[name] for name in ("q", "k", "v", "do"))
    alibi &= max(map(abs, offsets)) < FAR  # with FAR, float32 rounds all distances to one value
    slopes = normal(2).abs() / 8 if alibi else None  # float32 rounds scores of hundreds by more than the tolerance
    offsets = offsets[:1] * 2 if one else offsets
    o, lse = attention(
        q, k, v, offset=offsets[0] if one else offsets, causal=causal, window=window, alibi_slopes=slopes,
        backend=backend, return_lse=True,
    )  # fmt: skip
    actual = o, lse, *torch.autograd.grad(o, (q, k, v), do)
    o, lse = formula(q.double(), k.double(), v.double(), offsets, slopes, causal, window)
    true = o, lse, *torch.autograd.grad(o, (q, k, v), do.double())
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), actual, true, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_offset_of_the_lengths_has_the_bits_of_none(backend: str) -> None:
    """A call with the default offset as its argument has the bits of a call without the argument, also in `thd`."""
    options: dict[str, Any] = {"causal": True, "window": (2, 0), "backend": backend}
    expected = attention(Q, K, K, **options)
    for offset in (2, [2], [2, 2], torch.tensor(2), torch.tensor([2, 2], dtype=torch.int32)):
        assert torch.equal(attention(Q, K, K, offset=offset, **options), expected)
    starts = {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 5, 10]}
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (Q, K, K)]
    actual = attention(*packed, layout="thd", offset=[2, 2], **starts, **options)
    assert torch.equal(actual, attention(*packed, layout="thd", **starts, **options))
    top_left = attention(Q, K, K, causal_alignment="top_left", **options)
    assert torch.equal(attention(Q, K, K, offset=0, **options), top_left)


def test_a_step_that_moves_it_plans_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over offsets uses one plan and, on `triton`, one route, and its answers follow the offset."""
    forget()
    routes, plans = Mock(wraps=route.Route), Mock(wraps=specs.check_dtypes)
    monkeypatch.setattr(route, "Route", routes)
    monkeypatch.setattr(specs, "check_dtypes", plans)
    results = []
    for offset in range(4):
        results.append(attention(Q, K, K, offset=offset, causal=True, backend="triton"))
        if offset == 0:
            made = routes.call_count, plans.call_count
    assert (routes.call_count, plans.call_count) == made
    assert min(made) > 0
    assert len({tuple(o.flatten().tolist()) for o in results}) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offset": 1.5}, "must be"), ({"offset": True}, "must be"), ({"offset": "2"}, "must be"),
        ({"offset": [1, 2, 3]}, r"shape \[3\] must be \[\] or \[1\] or \[2\]"),
        ({"offset": [[1], [2]]}, r"shape \[2, 1\]"), ({"offset": torch.tensor(1.0)}, "dtype float32"),
        ({"offset": FAR + 1}, "must be between"), ({"offset": [0, -FAR - 1]}, "must be between"),
        ({"offset": 1 << 70}, "64 bits"), ({"offset": 1, "causal_alignment": "top_left"}, "top_left"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_offset_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=rf"offset: .*{message}"):
        attention(Q, K, K, causal=True, **given)
