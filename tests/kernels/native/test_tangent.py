"""The tangents of o and lse in C are right for each problem that the kernel takes, with the same bits at each level."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import Options, ProblemError, attention, native
from flashpoint_kernels.dispatching.dispatch import derivative_backend
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import normal, qkv, spec_of
from tests.support.kernels.tangents import DIRECTIONS, check_tangents, tangents

# torch itself uses torch.jit.script for forward-mode derivatives, and warns once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SIZES = Sizes(
    q_len=st.sampled_from([1, 2, 23, 64, 130, 400]), kv_len=st.sampled_from([1, 5, 127, 128, 200, 385]),
    dim=st.sampled_from([1, 8, 16, 40, 64, 111, 256]), value_dim=st.sampled_from([16, 24, 64, 100]),
)  # fmt: skip


def inputs(*shape: int, **keywords: Any) -> dict[str, Tensor]:
    return {name: t for name, t in qkv(*shape, **keywords).items() if name != "do"}


@given(problem=problems(SIZES, backward=True), names=st.sampled_from(DIRECTIONS))
@settings(max_examples=30, deadline=None)
def test_any_problem_agrees_with_float64(problem: tuple[dict[str, Tensor], dict[str, Any]], names: str) -> None:
    check_tangents(*problem, names)


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (70, 20), "scale": -0.3})


@pytest.mark.parametrize("names", DIRECTIONS)
def test_each_instruction_set_has_the_same_bits(
    level: str, lanes_of_four: native.Library, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    t = inputs(2, 4, 130, 200, 40, kv_heads=2, value_dim=24)
    found = [tangents(t, options, names)[2:] for options in OPTIONS]
    monkeypatch.setattr(native, "library", lambda: lanes_of_four)
    for actual, options in zip(found, OPTIONS, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, tangents(t, options, names)[2:], strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_a_row_depend_on_no_other_row(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    t = inputs(2, 4, 500, 300, 24, kv_heads=2)
    whole = tangents(t | {"offset": torch.tensor(-200)}, options)[2:]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = tangents(t | {"offset": torch.tensor(-200)}, options)[2:]
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))
    dots = {name: normal(*x.shape, seed=70 + n) for n, (name, x) in enumerate(t.items())}
    parts = [
        tuple((x[1:, :, 317:] if name == "q" else x[1:]).clone() for name, x in each.items()) for each in (t, dots)
    ]

    def solve(*inputs: Tensor) -> Any:
        return attention(*inputs, offset=torch.tensor(117), return_lse=True, **options)

    _, part = torch.func.jvp(solve, *parts)
    assert all(torch.equal(a, b[1:, :, 317:]) for a, b in zip(part, whole, strict=True))


@pytest.mark.parametrize(
    ("more", "backend"),
    [
        ({}, "cpu"),
        ({"causal": True, "window": (5, 0), "scale": 0.3, "causal_alignment": "top_left"}, "cpu"),
        ({"offset": torch.tensor(3), "kv_lengths": torch.tensor([3, 4])}, "cpu"),
        ({"softcap": 2.0}, "tiled"),
        ({"dropout_p": 0.5, "dropout_seed": 1}, "tiled"),
        ({"attn_mask": torch.ones(5, 9, dtype=torch.bool)}, "tiled"),
        ({"block_mask": torch.ones(1, 1, dtype=torch.bool)}, "tiled"),
        ({"alibi_slopes": torch.ones(4)}, "tiled"),
        ({"sinks": torch.ones(4)}, "tiled"),
        ({"backend": "tiled"}, "tiled"),
        ({"backend": "reference"}, "reference"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_the_kernel_does_not_have_is_left_to_tiled(more: dict[str, Any], backend: str, dtype: torch.dtype) -> None:
    t = inputs(2, 4, 5, 9, 8, kv_heads=2, dtype=dtype)
    given = t | {name: x for name, x in more.items() if isinstance(x, Tensor)}
    options = {name: value for name, value in more.items() if name not in given}
    spec = spec_of(given, Options(**options, return_lse=True), "forward")
    if "backend" not in options and dtype != torch.float32:
        backend = "tiled" if dtype == torch.bfloat16 else "reference"
    if options.get("backend") == "tiled" and dtype == torch.float64:
        with pytest.raises(ProblemError, match="does not support float64"):
            derivative_backend(spec, "cpu")
        return
    assert derivative_backend(spec, "cpu") == backend


def test_gradients_and_a_named_backend_do_not_take_the_kernel() -> None:
    t = qkv(1, 2, 5, 9, 8)
    assert derivative_backend(spec_of(t, Options(), "backward"), "cpu") == "tiled"
    del t["do"]
    with pytest.raises(ProblemError, match="cpu has no forward-mode or second derivatives"):
        tangents(t, {"backend": "cpu"})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e25], ids=str)
def test_numbers_beyond_products_are_left_to_tiled(name: str, value: float) -> None:
    t = inputs(1, 2, 40, 200, 16)
    t[name][0, 1, -1, 3] = value  # of the last query, or of the last key, which only this query sees
    found, expected = (tangents(t, {"causal": True, "backend": backend})[2:] for backend in ("auto", "tiled"))
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual[:, :, :-1], right[:, :, :-1], rtol=1e-5, atol=2e-5, equal_nan=True)
