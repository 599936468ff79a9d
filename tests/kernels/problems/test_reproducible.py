"""Batch invariance on the CPU: a sequence has the same bits alone and in a batch, at any address."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpoint_contract.spec import Row
from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.problems import reproducible
from flashpoint_kernels.problems.reproducible import (
    CORES,
    FLOPS_PER_THREAD,
    _cores,
    aligned,
    split,
    thread_count,
    threads,
)
from tests.support.kernels.solving import backward, forward, normal, qkv

DIM, HEADS = 40, 3


def answers(backend: str, t: dict[str, torch.Tensor], **options: object) -> dict[str, torch.Tensor]:
    saved = forward(backend, t, **options)
    return saved | backward(backend, t | saved, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 9), (150, 333), (257, 65)])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_bits_are_the_same_alone_and_among_others(
    backend: str, q_len: int, kv_len: int, causal: bool, dtype: torch.dtype
) -> None:
    """A sequence has the same bits alone, repeated, at each place of a batch, packed, and at an odd address."""
    one = qkv(1, HEADS, q_len, kv_len, DIM, dtype=dtype, seed=100)
    alone = answers(backend, one, causal=causal)

    def same(actual: dict[str, torch.Tensor], pick) -> None:  # type: ignore[no-untyped-def]
        for name, x in alone.items():
            assert torch.equal(pick(name, actual[name]), x[0]), name

    same(answers(backend, one, causal=causal), lambda _, x: x[0])
    others = qkv(3, HEADS, q_len, kv_len, DIM, dtype=dtype, seed=200)
    for place in range(3):
        batch = {name: x.clone() for name, x in others.items()}
        for name, x in batch.items():
            x[place] = one[name][0]
        same(answers(backend, batch, causal=causal), lambda _, x, place=place: x[place])
    odd = {name: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for name, x in one.items()}
    same(answers(backend, odd, causal=causal), lambda _, x: x[0])
    before = qkv(1, HEADS, 5, 11, DIM, dtype=dtype, seed=300)
    packed = {
        name: torch.cat([before[name][0], x[0], before[name][0]], 1).transpose(0, 1).contiguous()
        for name, x in one.items()
    }
    packed["cu_seqlens_q"] = torch.tensor([0, 5, 5 + q_len, 10 + q_len])
    packed["cu_seqlens_k"] = torch.tensor([0, 11, 11 + kv_len, 22 + kv_len])

    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        start, n = (11, kv_len) if name in ("dk", "dv") else (5, q_len)
        return x[:, start : start + n] if name == "lse" else x[start : start + n].transpose(0, 1)

    same(answers(backend, packed, causal=causal, layout="thd"), part)


def test_bits_do_not_depend_on_the_callers_thread_count() -> None:
    t = qkv(1, HEADS, 257, 300, DIM)
    results = []
    for count in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            results.append(answers("cpu", t) | {f"tiled {n}": x for n, x in answers("tiled", t).items()})
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(before)
    for name, x in results[0].items():
        assert all(torch.equal(other[name], x) for other in results[1:]), name


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "layout": "bshd"}])
def test_bits_of_a_request_cut_by_heads_are_those_of_the_whole(
    backend: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts with some of the heads have the bits of the whole request, in two layouts and with a mask for each head."""
    monkeypatch.setattr(reproducible, "PART_SECONDS", 1e-4)
    t = qkv(2, 4, 600, 560, 32, kv_heads=2)
    if options.get("layout") == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    t["attn_mask"] = torch.randn(2, 4, 600, 560, generator=torch.Generator().manual_seed(1))
    inputs = {name: x for name, x in t.items() if name != "do"}
    whole = Problem.create(inputs, Options(**options, return_lse=True))  # type: ignore[arg-type]
    parts = split(whole, backend)
    assert {part.spec.kv_heads for part in parts} == {1}
    assert sum(len(part.rows) for part in parts) == 4  # two sequences of two heads
    assert all(split(part, backend) == [part] for part in parts)
    run([whole], backend)
    saved = {name: x.clone() for name, x in whole.outputs.items()}
    for x in whole.outputs.values():
        x.fill_(float("nan"))
    for part in reversed(parts):
        run([part], backend)
    for name, x in saved.items():
        assert torch.equal(whole.outputs[name], x), name
    gradient = Problem.create(t | saved, Options(**options), "backward")  # type: ignore[arg-type]
    run([gradient], backend)
    again = Problem.create(t | saved, Options(**options), "backward")  # type: ignore[arg-type]
    for part in reversed(split(again, backend)):
        run([part], backend)
    assert all(torch.equal(again.outputs[name], x) for name, x in gradient.outputs.items())


def test_parts_draw_the_mask_and_give_the_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with some heads draws the whole request's dropout mask, and writes its heads' dsinks and dattn_mask."""
    monkeypatch.setattr(reproducible, "PART_SECONDS", 1e-7)
    t = qkv(2, 6, 20, 30, 8, kv_heads=3)
    t |= {"sinks": normal(6), "attn_mask": normal(6, 20, 30), "alibi_slopes": normal(2, 6).abs()}
    grads = ("dq", "dk", "dv", "dattn_mask", "dsinks")
    options = Options(dropout_p=0.4, dropout_seed=7, grads=grads, backend="tiled")
    packed = {name: x.transpose(1, 2).flatten(0, 1) for name, x in t.items() if name in ("q", "k", "v", "do")}
    packed |= {"sinks": t["sinks"], "alibi_slopes": t["alibi_slopes"]}
    packed |= {"cu_seqlens_q": torch.tensor([0, 13, 40]), "cu_seqlens_k": torch.tensor([0, 40, 60])}
    for tensors, more in ((t, options), (packed, replace(options, layout="thd", grads=("dq", "dv", "dsinks")))):
        assert len(split(Problem.create(tensors, more, "backward"), "tiled")) == 3
        report = verify(tensors, more)
        assert report.ok, [e for e in report.tensors if not e.ok]


def test_what_is_summed_over_heads_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducible, "PART_SECONDS", 1e-4)
    t = qkv(1, 4, 800, 800, 32)
    for shape, parts in (((800, 800), 1), ((1, 800, 1), 1), ((4, 1, 1), 4), ((1, 4, 800, 800), 4)):
        problem = Problem.create(t | {"attn_mask": torch.zeros(shape)}, Options(grads=("dq", "dattn_mask")), "backward")
        assert len(split(problem, "tiled")) == parts


def test_parts_for_the_gradient_of_a_mask_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts, each with one head and its mask, get a quarter of the cores each: no dattn_mask sums over heads."""
    monkeypatch.setattr(reproducible, "PART_SECONDS", 1e-4)
    t = qkv(1, 4, 800, 800, 32) | {"attn_mask": torch.zeros(4, 800, 800)}
    problem = Problem.create(t, Options(grads=("dattn_mask",)), "backward")
    assert [thread_count(part, part.rows[0]) for part in split(problem, "tiled")] == [max(1, CORES // 4)] * 4


def test_the_thread_count_is_a_function_of_the_sequences_own_shape() -> None:
    def count(batch: int, q_len: int, kv_len: int, heads: int = 1) -> int:
        tensors = {name: x for name, x in qkv(batch, heads, 4096, 4096, 8).items() if name != "do"}
        return thread_count(Problem.create(tensors, Options()), Row(0, 0, 0, q_len, 4096, 0, kv_len, 4096, 0))

    assert count(1, 0, 5) == count(2, 1, 1) == 1
    assert count(1, 300, 400) == count(3, 300, 400)
    assert count(1, 4096, 4096) == min(CORES, 2 * 4096 * 4096 * 16 // FLOPS_PER_THREAD)
    assert count(1, 4096, 4096, heads=CORES) == 1  # one core for each head


def test_threads_are_restored_after_an_error() -> None:
    tensors = {name: x for name, x in qkv(1, 1, 2, 2, 8).items() if name != "do"}
    before, seen = torch.get_num_threads(), []
    with (
        contextlib.suppress(ZeroDivisionError),
        threads(Problem.create(tensors, Options()), Row(*[0] * len(Row._fields))),
    ):
        seen.append(torch.get_num_threads())
        raise ZeroDivisionError
    assert seen == [1]
    assert torch.get_num_threads() == before


def test_aligned_copies_only_what_it_must() -> None:
    t = torch.zeros(4, 16)
    assert aligned(t, torch.float32) is t
    for other in (t.T, t.half(), torch.zeros(65)[1:].view(4, 16)):
        copy = aligned(other, torch.float32)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert copy.data_ptr() != other.data_ptr()
        assert torch.equal(copy, other.float())


BANDS: dict[str, dict[str, object]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (100, 3)},
    "alibi": {},
    "causal alibi": {"causal": True},
    "causal window alibi": {"causal": True, "window": (70, 0)},
}
any_sequences = given(
    batch=st.integers(1, 5), kv_heads=st.integers(1, 4), group=st.integers(1, 2), q_len=st.integers(1, 600),
    kv_len=st.integers(1, 600), dim=st.sampled_from([16, 24, 48, 64, 128]), band=st.sampled_from(list(BANDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), layout=st.sampled_from(["bhsd", "bshd"]),
    lengths=st.booleans(),
)  # fmt: skip


@any_sequences
@example(1, 1, 2, 17, 5, 16, "all", torch.float32, "bhsd", False)  # one key/value head gives one backward task
@example(2, 1, 1, 254, 517, 128, "all", torch.float32, "bhsd", False)  # a sequence alone uses two threads
@example(2, 1, 1, 30, 5000, 128, "all", torch.float32, "bhsd", False)  # one forward block of queries uses two threads
@example(2, 1, 1, 513, 600, 64, "causal alibi", torch.float32, "bhsd", False)  # ALiBi, and keys before all queries
@example(1, 2, 2, 330, 330, 64, "causal", torch.float32, "bhsd", True)  # the last block has few queries
@settings(max_examples=12, deadline=None)
def test_bits_are_the_same_with_neighbours_in_the_call_and_with_all_threads(
    batch: int, kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, band: str,
    dtype: torch.dtype, layout: str, lengths: bool,
) -> None:  # fmt: skip
    """One call with all threads has the bits of separate calls with one thread."""
    t = qkv(batch, group * kv_heads, q_len, kv_len, dim, kv_heads=kv_heads, dtype=dtype, seed=batch)
    if layout == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    padding = {"kv_lengths": torch.tensor([kv_len - (kv_len > 3 and b % 3 == 2) for b in range(batch)])}
    options: dict[str, object] = {**BANDS[band], "layout": layout}
    slopes = {"alibi_slopes": torch.rand(group * kv_heads)} if "alibi" in band else {}
    actual = answers("cpu", t | slopes | (padding if lengths else {}), **options)
    for b in range(batch):
        sequence = {name: x[b : b + 1] for name, x in t.items()}
        given_own = slopes | ({name: x[b : b + 1] for name, x in padding.items()} if lengths else {})
        alone = Problem.create({n: sequence[n] for n in "qkv"} | given_own, Options(**options, return_lse=True))  # type: ignore[arg-type]
        run_part(alone, "cpu")
        gradient = Problem.create(sequence | alone.outputs | given_own, Options(**options), "backward")  # type: ignore[arg-type]
        run_part(gradient, "cpu")
        for name, x in (alone.outputs | gradient.outputs).items():
            assert torch.equal(actual[name][b : b + 1], x), (b, name)


@pytest.mark.slow
@any_sequences
@settings(max_examples=30, deadline=None)
def test_more_sequences_have_the_same_bits_with_neighbours_and_with_all_threads(**drawn: Any) -> None:
    test_bits_are_the_same_with_neighbours_in_the_call_and_with_all_threads.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


def test_cores_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    """`_cores` returns the smaller of the usable cores and the container's quota, rounded down, but at least 1."""
    quota = tmp_path / "cpu.max"
    granted = len(os.sched_getaffinity(0))
    for text, cores in (
        ("max 100000", granted),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("99900000 100000", granted),
    ):
        quota.write_text(f"{text}\n")
        assert _cores(quota) == cores
    assert _cores(tmp_path / "none") == granted


@pytest.mark.slow
def test_cores_are_those_that_the_process_is_bound_to() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from flashpoint_kernels.problems.reproducible import CORES; print(CORES)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "1"
