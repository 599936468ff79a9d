"""`flex_attention` equals float64 for score_mods, masks, shapes, gradients and captured tensors, and saves memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torchs

from flashpoint_kernels import ProblemError, flex_attention
from flashpoint_kernels.operators import scores
from flashpoint_kernels.timing.clock import peak_bytes
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTH = 400  # the largest length, more than one tile of queries
TABLE = normal(2 * LENGTH, seed=20)
SLOPES = normal(8, seed=21).abs()
DOCUMENTS = torch.arange(LENGTH, device=DEVICE) // 37
Mod = Callable[..., Tensor]

SCORE_MODS: dict[str, Mod | None] = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s - SLOPES[h].to(s.dtype) * (i - j).abs(),
    "relative": lambda s, b, h, i, j: s + TABLE[i - j + LENGTH].to(s.dtype),
    "softcap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    "scaled": lambda s, b, h, i, j: s * (1 + b) / (1 + h),
    "hides": lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -float("inf"), s),
    "constant": lambda s, b, h, i, j: (i * j).to(s.dtype) / 1000,
}
MASK_MODS: dict[str, Mod] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() < 30,
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "heads": lambda b, h, i, j: (i >= j) & (i - j < 10 + 50 * h),
    "few": lambda b, h, i, j: (i % 7 != 3) & (j < 150),  # rows that see no key
    "all": lambda b, h, i, j: j >= 0,
}


def formula(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, seen: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and the largest score of each row from whole matrices; `score_mod` gets index matrices."""
    k, v = (t.expand(len(q), -1, -1, -1).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if score_mod is not None:
        sizes = [torch.arange(n, device=q.device) for n in s.shape]
        numbers = (n.view([-1 if axis == d else 1 for d in range(4)]) for axis, n in enumerate(sizes))
        s = score_mod(s, *numbers).expand(s.shape)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p @ v, lse, s.amax(-1)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, rows: str = "") -> None:
    expected = expected.detach()
    size = max(1.0, float(expected.masked_fill(expected.isinf(), 0).abs().max()))
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=BOUND[dtype] * size, rtol=BOUND[dtype], msg=lambda m: f"{rows}: {m}"
    )


@given(
    batch=st.integers(1, 2), heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    sizes=st.sampled_from([(1, 1), (5, 300), (130, 64), (200, 200), (257, 400), (400, 400)]),
    dims=st.sampled_from([(8, 8), (16, 40)]), dtype=st.sampled_from(list(BOUND)),
    score=st.sampled_from(list(SCORE_MODS)), mask=st.sampled_from([None, *MASK_MODS]),
    block=st.sampled_from([128, 64, (32, 128), (256, 16)]),
    of_all=st.booleans(), one_cache=st.booleans(), scale=st.sampled_from([None, 0.3, -0.2]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_out_and_gradients_are_those_of_the_formula(
    batch: int, heads: tuple[int, int], sizes: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, score: str,
    mask: str | None, block: Any, of_all: bool, one_cache: bool, scale: float | None,
) -> None:  # fmt: skip
    (queries, keys), of_cache = sizes, 1 if one_cache else batch
    shapes = (
        (batch, heads[0], queries, dims[0]),
        (of_cache, heads[1], keys, dims[0]),
        (of_cache, heads[1], keys, dims[1]),
    )
    leaves = [normal(*shape, seed=n).to(dtype).requires_grad_() for n, shape in enumerate(shapes)]
    blocks = seen = None
    if mask is not None:
        whole = (None, None) if of_all and mask != "heads" else (batch, heads[0])
        blocks = torchs.create_block_mask(MASK_MODS[mask], *whole, queries, keys, DEVICE, BLOCK_SIZE=block)
        seen = torchs.create_mask(MASK_MODS[mask], batch, heads[0], queries, keys, DEVICE)
    aux = torchs.AuxRequest(lse=True, max_scores=True)
    out, more = flex_attention(*leaves, SCORE_MODS[score], blocks, scale, heads[0] != heads[1], return_aux=aux)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = formula(*exact, SCORE_MODS[score], seen, scale)
    for name, x, y in zip(("out", "lse", "max"), (out, more.lse, more.max_scores), expected, strict=True):
        check(
            x, y, dtype if name == "out" or dtype == torch.float64 else max(dtype, torch.float32, key=BOUND.get), name
        )
    alive = expected[1].isfinite()
    do, dlse = normal(*out.shape, seed=7).to(dtype), normal(*alive.shape, seed=8)
    loss = (out * do).sum() + (more.lse * dlse)[alive].sum()
    actual = torch.autograd.grad(loss, leaves)
    right = torch.autograd.grad(
        (expected[0] * do).sum() + (expected[1] * dlse)[alive].sum(), exact, materialize_grads=True
    )
    for name, x, y in zip("qkv", actual, right, strict=True):
        check(x, y, dtype, f"d{name}")
        assert x.dtype == dtype


GLOBAL = normal(3, seed=30).requires_grad_()


class Bias(nn.Module):
    """A score_mod that is a module, with a parameter in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterList([nn.Parameter(normal(3, 40, 50, seed=31))])

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + self.inner[0][h, i, j]


class Table:
    """A score_mod that is a callable object."""

    def __init__(self, t: Tensor) -> None:
        self.kept = {"t": [t]}

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * self.kept["t"][0][h]

    def method(self, s: Tensor, *numbers: Tensor) -> Tensor:
        return self(s, *numbers)


class Slots:
    """A score_mod without a __dict__ that holds a leaf tensor and a tensor derived from it."""

    __slots__ = ("derived", "leaf")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self.derived = leaf, leaf * 0.1

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * self.leaf[h] + self.derived.exp()[h] * j


def by_default(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, t: Tensor = GLOBAL) -> Tensor:
    return s * t[h]


def by_name(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    def inside() -> Tensor:
        return GLOBAL[h]

    return s + inside() * j


def captures(how: str) -> tuple[Mod, Tensor]:
    """Return a score_mod that captures a tensor in the way `how`, and this tensor, which requires a gradient."""
    leaf = normal(3, seed=32).requires_grad_()
    table = Table(leaf)
    module = Bias()
    derived = leaf.exp() * 0.1  # not a leaf

    def closure(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + derived[h] * (i - j)

    def with_argument(t: Tensor, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * t[h]

    def through_another(s: Tensor, *numbers: Tensor) -> Tensor:
        return closure(s, *numbers) * 2

    ways: dict[str, tuple[Mod, Tensor]] = {
        "closure": (closure, leaf), "partial": (functools.partial(with_argument, leaf), leaf), "object": (table, leaf),
        "slots": (Slots(leaf), leaf), "method": (table.method, leaf), "module": (module, module.inner[0]),
        "default": (by_default, GLOBAL),
        "global": (by_name, GLOBAL), "another function": (through_another, leaf),
    }  # fmt: skip
    return ways[how]


@pytest.mark.parametrize(
    "how", ["closure", "partial", "object", "slots", "method", "module", "default", "global", "another function"]
)
def test_captured_tensors_get_their_gradients(how: str) -> None:
    score_mod, captured = captures(how)
    q, k, v = (normal(2, 3, n, 16, seed=n) for n in (40, 50, 50))
    (actual,) = torch.autograd.grad(flex_attention(q, k, v, score_mod).sin().sum(), captured, retain_graph=True)
    out, _, _ = formula(q, k, v, score_mod, None, None)
    (expected,) = torch.autograd.grad(out.sin().sum(), captured)
    assert expected.any()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


LONG, BUCKETS = 700, 5
BUCKET = (torch.arange(2 * LONG, device=DEVICE) - LONG).abs().add(1).log2().long().clamp(max=BUCKETS - 1)
ONE = torch.ones((), dtype=torch.float32, device=DEVICE)

# score_mods of a tensor t, with its shape. Many scores add to one number of the gradient of t.
SUMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "slopes": (lambda t, s, b, h, i, j: s + t[h] * ((i - j) / LONG), (2,)),
    "distances": (lambda t, s, b, h, i, j: s + t[h, i - j + LONG], (2, 2 * LONG)),
    "buckets": (lambda t, s, b, h, i, j: s * t[BUCKET[i - j + LONG], h], (BUCKETS, 2)),
    "a table that is computed": (lambda t, s, b, h, i, j: s + (t.exp() * 0.5).T[h, BUCKET[i - j + LONG]], (BUCKETS, 2)),
    "expanded": (lambda t, s, b, h, i, j: s * t.expand(3, 2, LONG)[b, h, j], (2, 1)),
    "beside another": (lambda t, s, b, h, i, j: s * torch.where(j < i, t[h], ONE.to(t.dtype)), (2,)),
    "in place": (lambda t, s, b, h, i, j: (s * 1).add_(t[h] * (j / LONG)), (2,)),
}  # fmt: skip


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_captured_16_bit_tensors_are_summed_in_float32(how: str, dtype: torch.dtype) -> None:
    score_mod, shape = SUMS[how]
    t = normal(*shape, seed=33).to(dtype).requires_grad_()
    exact = t.detach().double().requires_grad_()
    q, k, v = (normal(3, 2, LONG, 16, seed=n) for n in (34, 35, 36))
    out = flex_attention(q, k, v, functools.partial(score_mod, t))
    truth, _, _ = formula(q.double(), k.double(), v.double(), functools.partial(score_mod, exact), None, None)
    do = normal(*out.shape, seed=38)
    (actual,), (expected,) = torch.autograd.grad(out, t, do), torch.autograd.grad(truth, exact, do.double())
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


def test_a_model_that_score_mod_can_reach_gets_gradients_where_it_is_used_alone() -> None:
    model = nn.ModuleDict({"used": nn.Linear(1, 3), "other": nn.Linear(8, 8)})
    q = normal(1, 3, 20, 8)
    flex_attention(q, q, q, lambda s, b, h, i, j: s * model["used"].bias[h]).sum().backward()
    assert model["used"].bias.grad is not None
    assert [p.grad for p in (model["used"].weight, *model["other"].parameters())] == [None] * 3


def test_a_captured_tensor_that_changes_before_the_backward_is_an_error() -> None:
    q, bias = normal(1, 3, 20, 8).requires_grad_(), (normal(3).requires_grad_() * 1)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s * bias[h])
    with torch.no_grad():
        bias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_blocks_named_by_hand_are_seen_and_no_others() -> None:
    """A query sees only the blocks of a handmade block mask: all keys of full blocks, mask_mod's of partial ones."""
    counts = torch.tensor([[[1, 0, 2]]])
    indices = torch.tensor([[[[1, 0, 0], [0, 0, 0], [0, 2, 0]]]])
    full_counts, full_indices = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[2, 0, 0], [0, 0, 0], [0, 0, 0]]]])
    blocks = torchs.BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: (i + j) % 2 == 0,
        seq_lengths=(48, 48),
    )  # fmt: skip
    rows, columns = torch.arange(48)[:, None], torch.arange(48)
    partial = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]]).bool()
    full = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0]]).bool()
    place = rows // 16, columns // 16
    seen = full[place] | (partial[place] & ((rows + columns) % 2 == 0))
    q, k, v = (normal(1, 2, 48, 8, seed=n).cpu() for n in range(3))
    check(flex_attention(q, k, v, None, blocks), formula(q, k, v, None, seen, None)[0], torch.float32)  # type: ignore[arg-type]


def test_blocks_that_the_mask_excludes_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Excluded blocks are not computed: a window has at most three blocks for each query, and NaN keys are not read."""
    sizes: list[int] = []
    of_tile = scores.Flex.scores
    monkeypatch.setattr(scores.Flex, "scores", lambda self, x, n: (sizes.append(x.numel()), of_tile(self, x, n))[1])
    q, k, v = (normal(1, 2, 1024, 8, seed=n) for n in range(3))
    k[:, :, 512:] = torch.nan
    blocks = torchs.create_block_mask(
        lambda b, h, i, j: ((i - j).abs() < 64) & (j < 512), None, None, 1024, 1024, DEVICE
    )
    actual = flex_attention(q, k, v, None, blocks)
    assert isinstance(actual, Tensor)
    assert actual.isfinite().all()
    assert 0 < sum(sizes) <= 2 * 1024 * 3 * 128


@pytest.mark.slow
def test_memory_grows_with_n_and_not_with_its_square() -> None:
    def taken(length: int) -> int:
        q, k, v = (normal(1, 2, length, 16, seed=n).requires_grad_() for n in range(3))
        mod = SCORE_MODS["softcap"]
        return peak_bytes(lambda: torch.autograd.grad(flex_attention(q, k, v, mod).sum(), (q, k, v)), "cpu")

    few, many = taken(1024), taken(4096)
    assert many < 5 * few
    assert many < 2 * 4096 * 4096 * 4 / 2  # half of the scores of both heads in float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns
def test_a_compiled_program_breaks_its_graph_without_an_error() -> None:
    q, k, v = (normal(1, 2, 40, 8, seed=n).requires_grad_() for n in range(3))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q * 2, k, v, SCORE_MODS["alibi"])
        assert isinstance(out, Tensor)
        return out.sin()

    expected = torch.autograd.grad(program(q, k, v).sum(), (q, k, v))
    actual = torch.autograd.grad(torch.compile(program, backend="eager")(q, k, v).sum(), (q, k, v))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


BLOCKS = torchs.create_block_mask(MASK_MODS["causal"], None, None, 16, 16, DEVICE)
Q = normal(1, 4, 16, 8)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: flex_attention(Q[0], Q, Q), "query"),
        (lambda: flex_attention(Q, Q[..., :4], Q), "key"),
        (lambda: flex_attention(Q, Q[:, :2], Q[:, :2]), "key"),
        (lambda: flex_attention(Q, Q[:, :3], Q[:, :3], enable_gqa=True), "key"),
        (lambda: flex_attention(Q, Q, Q[:, :, :9]), "value"),
        (lambda: flex_attention(Q, Q, Q.bfloat16()), "value"),
        (lambda: flex_attention(Q.int(), Q.int(), Q.int()), "query"),
        (lambda: flex_attention(*[torch.cat([Q, Q], 2)] * 3, None, BLOCKS), "block_mask"),
        (lambda: flex_attention(Q, Q, Q, return_lse=True, return_aux=torchs.AuxRequest()), "return_lse"),
    ],
)
def test_an_error_names_the_argument(call: Callable[[], object], field: str) -> None:
    with pytest.raises(ProblemError) as error:
        call()
    assert field in [name for name, _ in error.value.errors]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_answers_and_gradients_lie_in_the_order_of_the_strides(order: tuple[int, ...]) -> None:
    given = [
        torch.empty_permuted((2, 3, n, 8), order, dtype=torch.float32, device=DEVICE).normal_().requires_grad_()
        for n in (20, 24, 24)
    ]
    out = flex_attention(*given)
    assert torch.equal(out, flex_attention(*(t.contiguous() for t in given)))
    gradients = torch.autograd.grad(out.sum(), given)
    for t in (out, *gradients):
        assert torch.empty_permuted(t.shape, order, device="meta").stride() == t.stride()


def test_torchs_mask_for_no_mask_is_taken() -> None:
    q, k = normal(1, 2, 20, 8), normal(1, 2, 300, 8)
    nothing = torchs._create_empty_block_mask(q, k)
    assert torch.equal(flex_attention(q, k, k, block_mask=nothing), flex_attention(q, k, k))
