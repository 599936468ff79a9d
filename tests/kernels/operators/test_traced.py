"""`torch.jit.trace` records each public function once, for all shapes of the same rank: the trace gives equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flashpoint_kernels import attention, attention_backward, flash_attn, flex_attention, merge
from flashpoint_kernels import scaled_dot_product_attention as sdpa
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

# Ignored: torch says that jit is deprecated, and names each size that the trace keeps as a constant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.trace"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

Shapes = Sequence[tuple[int, ...]]
Case = tuple[Callable[..., Any], Shapes, Shapes]


def _ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def _varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
    return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 9, 9, causal=True)


def _packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
    return attention(q, k, v, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True)


# name: (function, shapes that are traced, shapes that the trace runs with)
CASES: dict[str, Case] = {
    "attention": (attention, [(2, 4, 5, 8)] * 3, [(3, 4, 9, 8)] * 3),
    "one row": (attention, [(1, 4, 1, 8)] * 3, [(1, 4, 70, 8)] * 3),
    "bshd": (
        lambda q, k, v: attention(q, k, v, layout="bshd", causal=True, return_lse=True),
        [(2, 5, 4, 8)] * 3, [(1, 9, 4, 8)] * 3,
    ),
    "three dimensions": (attention, [(2, 5, 8)] * 3, [(1, 70, 8)] * 3),
    "two dimensions": (attention, [(5, 8)] * 3, [(70, 8)] * 3),
    "sdpa": (sdpa, [(2, 4, 5, 8)] * 3, [(3, 4, 9, 8)] * 3),
    "sdpa causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), [(2, 5, 8)] * 3, [(3, 9, 8)] * 3),
    "sdpa two dimensions": (sdpa, [(5, 8)] * 3, [(9, 8)] * 3),
    "sdpa broadcast": (
        sdpa, [(2, 3, 4, 5, 8), (3, 4, 6, 8), (1, 1, 4, 6, 8)], [(3, 2, 4, 6, 8), (2, 4, 9, 8), (1, 1, 4, 9, 8)]
    ),
    "sdpa mask": (sdpa, [*[(2, 4, 5, 8)] * 3, (5, 5)], [*[(3, 4, 9, 8)] * 3, (9, 9)]),
    "sdpa groups": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        [(2, 4, 5, 8), *[(2, 2, 5, 8)] * 2], [(1, 4, 9, 8), *[(1, 2, 9, 8)] * 2],
    ),
    "flash_attn": (flash_attn.flash_attn_func, [(2, 5, 4, 8)] * 3, [(3, 9, 4, 8)] * 3),
    "flex": (flex_attention, [(2, 4, 5, 8)] * 3, [(1, 4, 300, 8)] * 3),
    "merge": (
        lambda o, p, lse, m: merge([o, p], [lse, m]),
        [*[(2, 4, 5, 8)] * 2, *[(2, 4, 5)] * 2], [*[(3, 4, 9, 8)] * 2, *[(3, 4, 9)] * 2],
    ),
}  # fmt: skip


def _same(actual: Any, expected: Any) -> None:
    pairs = zip(*([one] if isinstance(one, Tensor) else one for one in (actual, expected)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_trace_answers_for_other_shapes(name: str, dtype: torch.dtype, differentiated: bool) -> None:
    function, traced, run = CASES[name]

    def made(shapes: Shapes) -> list[Tensor]:
        given = [normal(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        return [t.requires_grad_(differentiated) for t in given]

    trace = torch.jit.trace(function, made(traced), check_trace=False)  # two traces may name their nodes differently
    given = made(run)
    actual, expected = trace(*given), function(*given)
    _same(actual, expected)
    if differentiated:
        whole = [
            sum(t.double().square().sum() for t in ([o] if isinstance(o, Tensor) else o)) for o in (actual, expected)
        ]
        _same(*(torch.autograd.grad(loss, given) for loss in whole))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [_packed, _varlen])
def test_a_trace_answers_for_other_packed_sequences(function: Callable[..., Any]) -> None:
    trace = torch.jit.trace(function, ([*(normal(9, 4, 8, seed=n) for n in range(3)), _ends(0, 4, 9)]))
    for ends in (_ends(0, 4, 9), _ends(0, 5, 9, 12)):
        given = [*(normal(int(ends[-1]), 4, 8, seed=n) for n in range(3)), ends]
        _same(trace(*given), function(*given))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_modules_are_traced_with_ours(
    dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=dtype, device=DEVICE)
    layer.train(training)
    trace = torch.jit.trace(layer, (normal(2, 5, 16).to(dtype),), check_trace=False)
    for shape in ((2, 5, 16), (3, 9, 16)):
        x = normal(*shape).to(dtype)
        _same(trace(x), layer(x))


def test_dropout_is_drawn_anew_in_a_trace() -> None:
    given = [normal(1, 2, 40, 8, seed=n) for n in range(3)]
    trace = torch.jit.trace(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), given, check_trace=False)
    assert not torch.equal(trace(*given), trace(*given))


@pytest.mark.parametrize("name", ["score_mod", "block_mask"])
def test_flex_attention_with_functions_is_refused_in_a_trace_by_name(name: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    given = {
        "score_mod": lambda s, b, h, i, j: s + i - j,
        "block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, 9, 9, DEVICE),
    }
    with pytest.raises(ValueError, match=f"{name}: is not available under torch.jit.trace"):
        torch.jit.trace(lambda q, k, v: flex_attention(q, k, v, **{name: given[name]}), [normal(1, 1, 9, 8)] * 3)


def test_gradients_inside_a_trace_are_refused() -> None:
    given = [normal(1, 2, 5, 8, seed=n) for n in range(4)]
    with pytest.raises(RuntimeError, match="differentiate the answers of the trace"):
        torch.jit.trace(attention_backward, given)
