"""Key weights are the column sums of the probabilities, and rows of weights are the probabilities, with all options."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import plan
from flashpoint_kernels import Problem, attention, attention_backward, attention_weights, key_weights, run
from flashpoint_kernels.dispatching.support import unsupported
from flashpoint_kernels.problems.problem import tensor_info
from flashpoint_kernels.timing.clock import peak_bytes
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import normal
from tests.support.oracle import answer

DIMS = st.sampled_from([1, 16, 24, 40])
SIZES = Sizes(
    q_len=st.integers(0, 150), kv_len=st.integers(0, 150), dim=DIMS, value_dim=DIMS, kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
)  # fmt: skip
SMALL = SIZES._replace(q_len=st.integers(0, 40), kv_len=st.integers(0, 40), dim=st.sampled_from([16, 24]))
BLOCKS = (None, None, (16, 16), (48, 80))


def made(*shape: int, heads: int = 2, seed: int = 0) -> dict[str, Tensor]:
    batch, q_heads, q_len, kv_len = shape
    q, k, v = (
        normal(batch, h, n, 16, seed=seed + i)
        for i, (h, n) in enumerate(((q_heads, q_len), (heads, kv_len), (heads, kv_len)))
    )
    return {"q": q, "k": k, "v": v}


def close(actual: Tensor, expected: Tensor) -> None:
    """Check weights: each of the n probabilities in a sum has an error of a few ulps of float32, and of its score."""
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    error = (actual.double() - expected).abs()
    bound = 4e-5 * expected.abs() + 1e-6
    assert bool((error <= bound).all()), float((error / bound).max())


def judge(problem: tuple[dict[str, Tensor], dict[str, Any]], backend: str) -> None:
    tensors, options = problem
    call = Problem.create(tensors, Options(**options, backend=backend, return_key_weights=True))
    run([call], backend)
    expected = answer(tensors, options)
    close(call.outputs["key_weights"], expected["key_weights"])
    plain = Problem.create(tensors, Options(**options, backend=backend))
    run([plain], backend)
    for name in ("o", "lse"):  # of the same bits as without
        assert torch.equal(plain.outputs[name].nan_to_num(7), call.outputs[name].nan_to_num(7)), name


@given(problem=problems(SIZES, backward=False, block_sizes=BLOCKS))
@settings(max_examples=80)
def test_any_problem_on_the_cpu(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    judge(problem, "cpu")


@given(problem=problems(SIZES, backward=False, block_sizes=BLOCKS), backend=st.sampled_from(["tiled", "reference"]))
@settings(max_examples=40)
def test_any_problem_by_operators(problem: tuple[dict[str, Tensor], dict[str, Any]], backend: str) -> None:
    judge(problem, backend)


@given(problem=problems(SMALL, backward=False, block_sizes=(None, (16, 16)), page_sizes=(0, 16)))
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
def test_a_few_problems_on_triton(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    judge(problem, "triton")


@pytest.mark.full
@given(problem=problems(SMALL, backward=False, block_sizes=(None, (16, 16))))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_problem_on_triton(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    judge(problem, "triton")


@given(problem=problems(SMALL, backward=False, block_sizes=BLOCKS), data=st.data())
@settings(max_examples=30)
def test_rows_of_weights_add_up_to_key_weights(problem: Any, data: st.DataObject) -> None:
    """Each row is what the query alone gives; all rows together are the key weights of the library and the oracle."""
    tensors, options = problem
    options = {name: value for name, value in options.items() if name != "return_lse"}
    given_tensors = {name: t for name, t in tensors.items() if name not in ("v", "v_scale")}
    expected = answer(tensors, options)["key_weights"]
    axis = {"thd": 0, "bshd": 1, "bhsd": 2}[options["layout"]]
    queries = tensors["q"].shape[axis]
    rows = attention_weights(**given_tensors, **options, rows=range(queries))
    sums = key_weights(**given_tensors, **options)
    if "block_table" in tensors:
        for n, (row, whole, length) in enumerate(zip(rows, sums, tensors["kv_lengths"].tolist(), strict=True)):
            assert row.shape == (*whole.shape[:-1], queries, length)
            close(row.sum(-2), expected[n, :, :length])
            close(whole, expected[n, :, :length])
        return
    close(rows.sum(-2), expected)
    close(sums, expected)
    if queries:
        one = data.draw(st.integers(0, queries - 1))
        assert torch.equal(attention_weights(**given_tensors, **options, rows=[one])[..., 0, :], rows[..., one, :])


def test_attention_returns_them_last() -> None:
    t = made(2, 4, 9, 13)
    o, lse, weights = attention(**t, causal=True, return_lse=True, return_key_weights=True)
    assert torch.equal(o, attention(**t, causal=True))
    again = attention(**t, causal=True, return_key_weights=True)
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], weights)
    assert torch.equal(key_weights(t["q"], t["k"], lse=lse, causal=True), weights)
    close(weights, answer(t, {"causal": True})["key_weights"])


@pytest.mark.parametrize("shape", [(5, 7, 4), (2, 5, 7, 4)])
def test_one_head_has_no_dimension_of_heads(shape: tuple[int, ...]) -> None:
    *lead, q_len, kv_len, dim = shape
    q, k = normal(*lead, q_len, dim), normal(*lead, kv_len, dim, seed=1)
    close(key_weights(q, k), answer({"q": q, "k": k, "v": k}, {})["key_weights"])


def test_pages_give_a_list() -> None:
    q, pool = normal(2, 4, 3, 16), normal(9, 2, 16, 16, seed=1)
    table, lengths = torch.tensor([[3, 8, 0], [1, 2, 2]], dtype=torch.int32), torch.tensor([40, 5])
    asked = {"block_table": table, "kv_lengths": lengths, "return_key_weights": True, "causal": True}
    _, weights = attention(q, pool, pool, **asked)
    assert [tuple(t.shape) for t in weights] == [(4, 40), (4, 5)]
    padded = answer({"q": q, "k": pool, "v": pool, "block_table": table, "kv_lengths": lengths}, {"causal": True})
    for n, found in enumerate(weights):
        close(found, padded["key_weights"][n, :, : found.shape[1]])


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_neighbours_and_threads_change_no_bits(backend: str) -> None:
    """A sequence has the bits of a call of its own, beside a longer one, one with NaN, and one without queries."""
    t = made(4, 4, 200, 300)
    lengths = {"q_lengths": torch.tensor([200, 50, 0, 130]), "kv_lengths": torch.tensor([300, 70, 9, 10])}
    t["k"][0, :, 7] = math.nan
    found = key_weights(t["q"], t["k"], **lengths, causal=True, backend=backend)
    assert found[0].isnan().any()
    for n in range(1, 4):
        q_len, kv_len = (int(lengths[name][n]) for name in ("q_lengths", "kv_lengths"))
        alone = key_weights(t["q"][n : n + 1, :, :q_len], t["k"][n : n + 1, :, :kv_len], causal=True, backend=backend)
        assert torch.equal(found[n, :, :kv_len], alone[0])
        assert not found[n, :, kv_len:].any()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(found[1:], key_weights(t["q"], t["k"], **lengths, causal=True, backend=backend)[1:])
    finally:
        torch.set_num_threads(threads)


def test_nan_of_a_head_stays_in_it() -> None:
    t = made(1, 6, 40, 50)
    t["q"][0, 4, 3, 0] = math.nan
    found = key_weights(t["q"], t["k"])
    assert found[0, 4].isnan().all()
    assert not found[0, [0, 1, 2, 3, 5]].isnan().any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_they_have_no_gradient_and_o_keeps_its_own() -> None:
    t = {name: x.requires_grad_() for name, x in made(1, 4, 9, 13).items()}
    o, weights = attention(**t, return_key_weights=True)
    expected = torch.autograd.grad(attention(**t).sum(), [*t.values()])
    for gradient, right in zip(torch.autograd.grad(o.sum(), [*t.values()], retain_graph=True), expected, strict=True):
        assert torch.equal(gradient, right)
    for asked in (
        weights, key_weights(t["q"], t["k"]), attention_weights(t["q"], t["k"], rows=[1]), o.sum() + weights.sum(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="key weights have no gradient"):
            asked.sum().backward()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: key_weights(q, t["k"]).sum())(t["q"].detach())
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda q: key_weights(q, t["k"].detach()), (t["q"].detach(),), (t["q"].detach(),))


def test_what_is_refused_is_named() -> None:
    t = made(1, 4, 9, 13)
    spec = plan({n: tensor_info(n, x) for n, x in t.items()}, Options(return_key_weights=True), "forward")
    assert ("return_key_weights", "the torch backend does not support key weights") in unsupported("torch", spec)
    with pytest.raises(ProblemError, match="must be a bool"):
        attention(**t, return_key_weights=1)
    with pytest.raises(TypeError, match="return_key_weights"):
        attention_backward(t["q"], **t, return_key_weights=True)  # type: ignore[call-arg]
    infos = {n: tensor_info(n, x) for n, x in (t | {"do": t["q"]}).items()}
    with pytest.raises(ProblemError, match="return_key_weights: is only for the forward"):
        plan(infos, Options(return_key_weights=True), "backward")
    for wrong in ([9], [-1], [1.5], 3, [True]):
        with pytest.raises(ProblemError, match="rows: must be a list of numbers from 0 to 8"):
            attention_weights(t["q"], t["k"], rows=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'v_scale'"):
        key_weights(t["q"], t["k"], v_scale=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference", "triton"])
def test_wide_heads(backend: str) -> None:
    q, k = normal(1, 2, 20, 576), normal(1, 1, 40, 576, seed=1)
    close(
        key_weights(q, k, backend=backend, causal=True),
        answer({"q": q, "k": k, "v": k}, {"causal": True})["key_weights"],
    )


@pytest.mark.slow
def test_torch_compile_sees_one_node() -> None:
    t = made(2, 4, 9, 13)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, return_key_weights=True), fullgraph=True, backend="eager"
    )
    for a, b in zip(compiled(*t.values()), attention(**t, return_key_weights=True), strict=True):
        assert torch.equal(a, b)


def test_the_operator_knows_its_shapes() -> None:
    t = made(2, 4, 9, 13)
    operator = torch.ops.flashpoint.key_weights.default
    for layout, rows in (("bhsd", None), ("bhsd", [0, 3]), ("bshd", [8])):
        given_tensors = [t[n] if layout == "bhsd" else t[n].transpose(1, 2) for n in "qk"]
        arguments = (*given_tensors, *[None] * 12, rows, repr({"layout": layout}))
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
def test_memory_is_linear_at_16k() -> None:
    """All probabilities of 16,384 tokens are 1 GiB in float32; the process' peak grows by less than 1/20."""
    program = """
import resource, torch
from flashpoint_kernels import attention
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def call(n):
    q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float32, device="cpu") for _ in range(3))
    attention(q, k, v, causal=True, return_key_weights=True)
call(256)
before = peak()
call(16384)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (1 << 30) // 20


def test_the_parts_of_long_queries_add_up_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several parts of the queries has sums of its own: of a number for each key, not of its gradient too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    q, k = normal(1, 1, 16384, 64), normal(1, 1, 8192, 64, seed=1)
    lse = torch.zeros(1, 1, 16384)
    key_weights(q[:, :, :64], k[:, :, :64], lse=lse[:, :, :64])
    found = peak_bytes(lambda: key_weights(q, k, lse=lse), "cpu")
    assert found is None or found < 6 << 20  # sums of 5 parts for keys of 65 numbers take 10.2 MiB
