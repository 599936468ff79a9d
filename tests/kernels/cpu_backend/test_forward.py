"""The forward in C has the same bits for any pages and any number of threads, alone and beside other sequences."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import Options, Problem, attention, native, run, verify
from flashpoint_kernels.cpu_backend import forward as native_forward
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.native.forward import CHUNK
from tests.support.kernels.serving import in_pages
from tests.support.kernels.solving import forward, forward_of, normal, qkv

PAGES = [16, 100, 256, 1024, 1500, 2048]


LAYOUTS = ["bhsd", "bshd", "thd"]


FEW = {  # each value once; the other combinations are slow
    (size, LAYOUTS[n % 3], (torch.float32, torch.bfloat16)[n % 2]) for n, size in enumerate(PAGES)
}


@pytest.mark.parametrize(
    ("size", "layout", "dtype"),
    [
        pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow)
        for case in itertools.product(PAGES, LAYOUTS, (torch.float32, torch.bfloat16))
    ],
)
def test_bits_are_the_same_in_pages_of_any_size_in_any_order(size: int, layout: str, dtype: torch.dtype) -> None:
    """Keys in pages of any size, in random order or consecutive, strided or not, have the bits of unpaged keys."""
    t = {n: x for n, x in qkv(2, 4, 1, 2600, 16, kv_heads=2, dtype=dtype).items() if n != "do"}
    t["kv_lengths"] = torch.tensor([2600, 2050])
    if layout != "bhsd":
        t = {n: x.transpose(1, 2).contiguous() if n in "qkv" else x for n, x in t.items()}
    dense_layout = "bshd" if layout == "thd" else layout
    expected = forward("cpu", t, layout=dense_layout)
    for strided in (False, True):
        paged = in_pages(t, dense_layout, size, strided=strided)
        given = dict(paged)
        if layout == "thd":
            given |= {"q": paged["q"].flatten(0, 1), "cu_seqlens_q": torch.tensor([0, 1, 2])}
        actual = forward("cpu", given, layout=layout)
        assert torch.equal(actual["o"].view(expected["o"].shape), expected["o"])
        # The same pages, consecutive for each sequence.
        table = paged["block_table"]
        k, v = (paged[n][table.long().clamp(0, len(paged["k"]) - 1).flatten()] for n in "kv")
        row = torch.arange(table.numel(), dtype=torch.int32).view(table.shape)
        actual = forward("cpu", given | {"k": k, "v": v, "block_table": row}, layout=layout)
        assert torch.equal(actual["o"].view(expected["o"].shape), expected["o"])


@pytest.mark.parametrize("size", [CHUNK, 2 * CHUNK])
def test_pages_of_whole_chunks_anywhere_and_shared_have_the_bits_of_each_sequence_alone(size: int) -> None:
    """Sequences with a shared first page and other pages anywhere in a larger pool have the bits of each alone."""
    pages = 4 * CHUNK // size
    numbers = torch.randperm(64, generator=torch.Generator().manual_seed(0))[: 3 * pages].view(3, pages).int()
    numbers[1:, 0] = numbers[0, 0]
    q, k, v = normal(3, 4, 1, 16, seed=0), normal(64, 2, size, 16, seed=1), normal(64, 2, size, 16, seed=2)
    length = 4 * CHUNK - 100
    k[numbers[2, -1], 1, 3, 0] = torch.nan
    actual, lse = attention(q, k, v, block_table=numbers, kv_lengths=torch.full((3,), length), return_lse=True)
    for b in range(3):
        alone = [t[numbers[b].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for t in (k, v)]
        expected, expected_lse = attention(q[b : b + 1], *alone, return_lse=True)
        assert torch.equal(actual[b].nan_to_num(7.0), expected[0].nan_to_num(7.0))
        assert torch.equal(lse[b].nan_to_num(7.0), expected_lse[0].nan_to_num(7.0))
    assert actual.isnan().any(-1).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_minus_infinity_and_nan_in_pages(dtype: torch.dtype) -> None:
    t = {n: normal(1, 2, 1 if n == "q" else 3 * CHUNK, 16, dtype=dtype, seed=s) for s, n in enumerate("qkv")}
    t["q"][..., 0] = 1.0
    t["k"][0, 0, :CHUNK, 0] = -torch.inf
    t["k"][0, 1, CHUNK + 3, 0] = torch.nan
    expected = forward("cpu", t)
    actual = forward("cpu", in_pages(t, "bhsd", 16))
    for name in ("o", "lse"):
        assert torch.equal(actual[name].nan_to_num(7.0), expected[name].nan_to_num(7.0)), name
    assert actual["o"][0, 0].isfinite().all()
    assert actual["o"][0, 1].isnan().all()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kv_len", [1024, 3333])
def test_bits_do_not_depend_on_the_number_of_threads(rows: int, kv_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of threads that share the chunks of a head's keys gives the same bits, also with a window."""
    monkeypatch.setattr("flashpoint_kernels.native.forward._LEAST_BYTES", 1)
    for heads, options in itertools.product((1, 3), ({}, {"causal": True, "window": (1500, -1)})):
        t = {n: x for n, x in qkv(2, heads, rows, kv_len, 64).items() if n != "do"}
        results = []
        for threads in (1, 2, 3, 5, 16):
            problem = forward_of(t, **options)
            native_forward.prepared(problem, problem.rows, threads)()
            results.append(problem.outputs)
        for other, name in itertools.product(results[1:], ("o", "lse")):
            assert torch.equal(other[name], results[0][name]), (name, heads)
        verified = verify(t, Options(backend="cpu", **options))
        assert verified.ok, [e for e in verified.tensors if not e.ok]


def test_sequences_of_few_and_of_many_queries_in_one_problem() -> None:
    t = {n: x for n, x in qkv(3, 2, 40, 1100, 16).items() if n != "do"}
    t |= {"q_lengths": torch.tensor([40, 1, 1]), "kv_lengths": torch.tensor([40, 1100, 1024])}
    report = verify(t, Options(backend="cpu", causal=True))
    assert report.ok
    problem = forward_of(t, causal=True)
    run([problem], "cpu")
    for b, (q_len, kv_len) in enumerate(((40, 40), (1, 1100), (1, 1024))):
        alone = {n: t[n][b : b + 1, :, : q_len if n == "q" else kv_len] for n in "qkv"}
        assert torch.equal(attention(**alone, causal=True), problem.outputs["o"][b : b + 1, :, :q_len])


@pytest.mark.slow
@given(
    layout=st.sampled_from(["bhsd", "bshd", "thd"]), lengths=st.sets(st.sampled_from(["q_lengths", "kv_lengths"])),
    more=st.sampled_from(["", "bool", "float", "one mask", "blocks", "slopes", "sinks", "slopes of each"]),
    options=st.sampled_from([
        {}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "causal_alignment": "top_left"}, {"softcap": 3.0},
        {"dropout_p": 0.3, "dropout_seed": 5},
    ]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), threads=st.sampled_from([1, 2]), seed=st.integers(0, 99),
    pages=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_many_short_sequences_have_the_bits_of_few_at_a_time(
    layout: str, lengths: set[str], more: str, options: dict[str, Any], dtype: torch.dtype, threads: int, seed: int,
    pages: bool,
) -> None:  # fmt: skip
    """Many short sequences that are computed in one step have the bits of sequences computed one after another."""
    n, q_len, kv_len = (300, 18, 35) if more == "blocks" else (300, 3, 9)
    generator = torch.Generator().manual_seed(seed)
    t = qkv(n, 4, q_len, kv_len, 16, kv_heads=2, dtype=dtype)
    if pages:
        del t["do"]
    if layout == "thd":
        t = {name: x.transpose(1, 2).flatten(0, 1) for name, x in t.items()}
        for name, length in (("cu_seqlens_q", q_len), ("cu_seqlens_k", kv_len)):
            edges, _ = torch.randint(0, n * length + 1, (n - 1,), generator=generator).sort()
            t[name] = torch.cat([torch.tensor([0]), edges, torch.tensor([n * length])])
    else:
        t = {name: x.transpose(1, 2) if layout == "bshd" else x for name, x in t.items()}
        for name in lengths:
            max_length = q_len if name == "q_lengths" else kv_len
            t[name] = torch.randint(0, max_length + 1, (n,), generator=generator)
        masks = {
            "bool": torch.rand(n, 1, q_len, kv_len, generator=generator) > 0.3,
            "float": torch.randn(n, 4, q_len, kv_len, generator=generator),
            "one mask": torch.randn(q_len, kv_len, generator=generator),
        }
        if more in masks:
            t["attn_mask"] = masks[more]
        if more == "blocks":
            t["block_mask"] = torch.rand(n, 1, 2, 3, generator=generator) > 0.3
            options = options | {"block_size": (16, 16)}
        if more.startswith("slopes"):
            t["alibi_slopes"] = torch.rand((n, 4) if more == "slopes of each" else (4,), generator=generator)
        if more == "sinks":
            t["sinks"] = torch.randn(4, generator=generator)
    if pages:
        t = in_pages(t, layout, 5 if more == "blocks" else 3)

    def answers() -> dict[str, Tensor]:
        problem = forward_of(t, layout=layout, **options)
        problem.threads = threads
        run_part(problem, "cpu")
        if pages:
            return problem.outputs
        grads = [
            "dq",
            "dk",
            "dv",
            *(["dsinks"] if "sinks" in t else []),
            *(["dattn_mask"] if more == "float" and "attn_mask" in t else []),
        ]
        given = Options(layout=layout, grads=tuple(grads), **options)
        gradient = Problem.create(t | problem.outputs | {"dlse": problem.outputs["lse"]}, given, "backward")
        gradient.threads = threads
        run_part(gradient, "cpu")
        return problem.outputs | gradient.outputs

    combined = answers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.forward, "TOGETHER", n + 1)
        alone = answers()
    assert all(torch.equal(combined[name], x) for name, x in alone.items())
