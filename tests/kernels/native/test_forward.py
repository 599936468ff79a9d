"""The forward in C is right, and has the same bits if parts with some sequences and heads are computed separately."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, attention, verify
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.native.forward import CHUNK
from flashpoint_kernels.problems.cost import NOMINAL, row_seconds
from flashpoint_kernels.problems.reproducible import split
from tests.support.kernels.solving import backward, forward, forward_of, normal, qkv

LENGTHS = st.sampled_from([512, 700, 1024, 1025, 1536, 2048, 2560, 4099])


@pytest.mark.slow
@given(
    kv_heads=st.integers(1, 3), group=st.sampled_from([1, 4]), q_len=st.sampled_from([1, 2, 5, 16]), kv_len=LENGTHS,
    dim=st.sampled_from([16, 64]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["bhsd", "bshd"]), scale=st.sampled_from([None, -0.2, 0.0]),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_bits_are_those_of_a_sequence_alone_on_one_thread_however_it_is_cut(
    kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, dtype: torch.dtype, layout: str, scale: float | None
) -> None:
    t = qkv(3, kv_heads * group, q_len, kv_len, dim, kv_heads=kv_heads, dtype=dtype)
    if layout == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    options: dict[str, Any] = {"layout": layout, "scale": scale}
    o, lse = attention(t["q"], t["k"], t["v"], **options, return_lse=True)
    heads = 2 if layout == "bshd" else 1
    for b in range(3):
        one = forward_of({name: x[b : b + 1] for name, x in t.items()}, **options)
        run_part(one, "cpu")
        assert torch.equal(one.outputs["o"][0], o[b])
        assert torch.equal(one.outputs["lse"][0], lse[b])
        for head in range(kv_heads):
            part = one.heads(head, head + 1)
            expected = part.outputs["o"].clone()
            part.outputs["o"].fill_(torch.nan)
            run_part(part, "cpu")
            assert torch.equal(part.outputs["o"], expected), (heads, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_answers_agree_with_float64(dtype: torch.dtype) -> None:
    for q_len, kv_len, group, sinks in ((1, 3000, 4, True), (16, 1024, 4, False), (1, 600, 1, False)):
        t = {n: x for n, x in qkv(2, 2 * group, q_len, kv_len, 64, kv_heads=2, dtype=dtype).items() if n != "do"}
        if sinks:
            t["sinks"] = normal(2 * group)
        report = verify(t, Options(backend="cpu"))
        assert report.ok, [e for e in report.tensors if not e.ok]


@pytest.mark.parametrize("rows", [1, 64])
def test_the_error_does_not_grow_with_the_number_of_keys(rows: int) -> None:
    """The kernel sums each block of keys by itself; the error of one sum over all 4,096 keys was twice this limit."""
    t = qkv(1, 2, rows, 4096, 32)
    expected = forward("reference", {name: x.double() for name, x in t.items()})["o"]
    error = (forward("cpu", t)["o"] - expected).norm() / expected.norm()
    assert error < 4.5e-7


def test_a_gradient_runs_the_forward_that_a_caller_would_bring() -> None:
    t = qkv(2, 4, 2, 1500, 16, kv_heads=2, dtype=torch.bfloat16)
    saved = forward("cpu", {n: x for n, x in t.items() if n != "do"})
    for name, x in backward("cpu", t | saved).items():
        assert torch.equal(backward("cpu", t)[name], x), name


def test_scores_of_nan_and_minus_infinity_in_a_chunk() -> None:
    """A chunk of keys whose scores are −∞ does not change the answer; a NaN score makes the answer NaN."""
    t = {n: normal(1, 2, 1 if n == "q" else 2 * CHUNK + 100, 16, seed=s) for s, n in enumerate("qkv")}
    t["q"][..., 0] = 1.0
    t["k"][0, 0, :CHUNK, 0] = -torch.inf
    t["k"][0, 1, CHUNK + 3, 0] = torch.nan
    o, lse = attention(**t, return_lse=True)
    right, right_lse = attention(t["q"], t["k"][:, :, CHUNK:], t["v"][:, :, CHUNK:], return_lse=True)
    torch.testing.assert_close(o[:, 0], right[:, 0])
    torch.testing.assert_close(lse[:, 0], right_lse[:, 0])
    assert o[0, 1].isnan().all()
    t["k"][0, 0, :, 0] = -torch.inf
    o, lse = attention(**t, return_lse=True)
    assert o[0, 0].eq(0).all()
    assert lse[0, 0].item() == -torch.inf


def test_work_is_cut_by_the_bytes_that_it_reads() -> None:
    """A problem of only 67 MFLOP is cut into parts, because it reads 134 MB of keys and values."""
    spec_only = {n: torch.empty(8, 8, 1 if n == "q" else 4096, 64) for n in "qkv"}
    problem = forward_of(spec_only)
    assert row_seconds(problem.spec, NOMINAL["cpu"], problem.rows[0]) > 1e-3
    parts = split(problem, "cpu")
    assert len(parts) > 2
    assert sum(len(part.rows) * part.spec.kv_heads for part in parts) == 64
    one = forward_of({n: t[:1].expand(1, 8, -1, -1) for n, t in spec_only.items()})
    assert len(split(one, "cpu")) == 1
