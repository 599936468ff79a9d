"""The tile loop is exact for any shape, strides and options, and its memory does not grow with Sq·Sk."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.tiled_backend import tiles
from tests.conftest import DEVICE
from tests.support.kernels.made import Made
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import backward, forward, normal, qkv

# The tests set small tiles, so that these few rows span many tiles.
SIZES = Sizes(
    q_len=st.integers(1, 70), kv_len=st.integers(0, 70), dim=st.integers(1, 40), value_dim=st.integers(1, 40),
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), group=st.integers(1, 3),
)  # fmt: skip
any_problem = given(
    problem=problems(
        SIZES, backward=True, slope=1.0, windows=[*product((-1, 0, 3, 15, 40), repeat=2)],
        block_sizes=(None, None, None, (16, 16), (48, 80)),
    )
)  # fmt: skip


@any_problem
@settings(max_examples=30, deadline=None)
def test_any_problem_is_exact(problem: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    tensors, options = problem
    with pytest.MonkeyPatch.context() as patch:
        for name, tile in (("FORWARD_TILE", (16, 24)), ("BACKWARD_TILE", (24, 16))):
            patch.setattr(tiles, name, tile)
            patch.setattr(tiles, f"DROPOUT_{name}", tile)
        report = verify(tensors, Options(**options, backend="tiled"))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.full
@any_problem
@settings(max_examples=2000, deadline=None)
def test_very_many_problems_are_exact(problem: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    test_any_problem_is_exact.hypothesis.inner_test(problem)  # type: ignore[attr-defined]


@pytest.mark.parametrize("grad", ["dq", "dk", "dv", "dattn_mask", "dsinks"])
def test_a_gradient_alone_is_as_among_others(grad: str) -> None:
    t = qkv(2, 2, 30, 40, 8) | {"attn_mask": normal(2, 30, 1), "sinks": normal(2)}
    everything = backward("tiled", t, grads=["dq", "dk", "dv", "dattn_mask", "dsinks"])
    alone = backward("tiled", t, grads=[grad])
    assert alone.keys() == {grad}
    assert torch.equal(alone[grad], everything[grad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{"window": (20, 9)}, {"causal": True}, {"window": (3, 0)}, {}], ids=str)
def test_the_gradient_of_a_mask_of_each_scores_own_is_written_whole(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a full mask is 0, not old memory, for tiles outside the window and for rows beyond a length."""
    monkeypatch.setattr(tiles, "BACKWARD_TILE", (16, 24))
    t = qkv(2, 2, 70, 90, 8) | {"attn_mask": normal(2, 2, 70, 90).to(dtype)}
    for lengths in ({}, {"q_lengths": torch.tensor([70, 41]), "kv_lengths": torch.tensor([0, 77])}):
        results = []
        for backend in ("tiled", "reference"):
            problem = Problem.create(t | lengths, Options(grads=("dattn_mask",), **options), "backward")
            problem.outputs["dattn_mask"].fill_(torch.nan)
            run([problem], backend)
            grad = problem.outputs["dattn_mask"]
            results.append(grad.float() if dtype == torch.float64 else grad)  # `tiled` computes in float32
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("block", [(16, 16), (32, 8), (7, 50), (1000, 1000)])
def test_dropout_does_not_depend_on_the_tiles(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every division into tiles drops the same probabilities, also if tiles start at a key that is no multiple of 4."""
    t = qkv(1, 2, 50, 60, 8)
    t["v"] = torch.eye(60, device=DEVICE).expand(1, 2, 60, 60).contiguous()  # o is P after dropout
    options: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": 3, "window": (20, 9)}
    expected = forward("reference", t, **options)["o"] != 0
    monkeypatch.setattr(tiles, "DROPOUT_FORWARD_TILE", block)
    assert torch.equal(forward("tiled", t, **options)["o"] != 0, expected)


def test_sharp_softmax_does_not_overflow() -> None:
    """Scores of ±thousands do not overflow: the running maximum keeps every exponent at or below 0."""
    t = qkv(1, 2, 40, 300, 16)
    t["q"] *= 1000
    report = verify(t, Options(backend="tiled"))
    assert all(torch.isfinite(torch.tensor(e.max_abs)) for e in report.tensors)
    o = forward("tiled", t)["o"]
    first, second = (t["q"] @ t["k"].mT / 4.0).topk(2).values.unbind(-1)
    clear = first - second > 50  # the softmax in float32 has only one weight there
    assert clear.float().mean() > 0.5
    best = (t["q"] @ t["k"].mT).argmax(-1)
    expected = t["v"].gather(2, best[..., None].expand(-1, -1, -1, 16))
    torch.testing.assert_close(o[clear], expected[clear], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solve", [forward, backward])
def test_a_tile_is_a_fraction_of_the_materialised(solve: Callable[..., object]) -> None:
    """A tile takes less than a hundredth of the memory of a float32 matrix of all scores."""
    n = 8192
    t = qkv(1, 1, n, n, 16)
    with Made() as made:
        solve("tiled", t, window=(512, 0))
    assert 0 < made.largest < n * n * 4 / 100


def test_a_tile_of_many_heads_is_no_larger_than_that_of_one() -> None:
    """If 32 heads share the gradient of a mask, each tile has all heads, so it has fewer scores per head.

    Tiles of 1024 × 256 scores for each head would take 32 MiB.
    """
    t = qkv(1, 32, 1024, 1024, 8) | {"attn_mask": normal(1024, 1024)}
    with Made() as made:
        backward("tiled", t, grads=["dattn_mask"])
    assert 0 < made.largest <= 4 << 20


@pytest.mark.parametrize("size", [(5, 5, 6), (300, 300, 64), (129, 130, 20)], ids=str)
def test_the_bits_of_a_head_do_not_depend_on_the_others(size: tuple[int, int, int]) -> None:
    """A head has the same bits alone and among others, also if its keys fill several tiles or not a whole vector."""
    t = qkv(2, 6, *size) | {"sinks": normal(6)}
    names = ["dq", "dk", "dv", "dsinks"]
    o, grads = (
        forward("tiled", {n: x for n, x in t.items() if n != "do"}, causal=True)["o"],
        backward("tiled", t, causal=True, grads=names),
    )
    for head in range(6):
        head_tensors = {
            name: (x[head : head + 1] if name == "sinks" else x[:, head : head + 1]).clone() for name, x in t.items()
        }
        assert torch.equal(
            forward("tiled", {n: x for n, x in head_tensors.items() if n != "do"}, causal=True)["o"],
            o[:, head : head + 1],
        )
        for name, grad in backward("tiled", head_tensors, causal=True, grads=names).items():
            whole = grads[name]
            assert torch.equal(grad, whole[head : head + 1] if name == "dsinks" else whole[:, head : head + 1]), name


def test_outputs_may_be_any_subset() -> None:
    t = {name: x for name, x in qkv(1, 2, 30, 40, 8).items() if name != "do"}
    problem = Problem.create(t, Options(return_lse=True))
    o = problem.outputs.pop("o")
    o.fill_(7.0)
    tiles.forward([problem])
    assert torch.equal(problem.outputs["lse"], forward("tiled", t)["lse"])
    assert bool((o == 7.0).all())
