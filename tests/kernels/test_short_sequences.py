"""Short sequences are computed together in one operator call, and each has right answers and the same bits as alone."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashpoint_contract.spec import Row
from flashpoint_kernels import Options, Problem
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.dispatching.support import unsupported
from flashpoint_kernels.problems import reproducible
from flashpoint_kernels.problems.cost import NOMINAL, extent_of, flops_of, seconds_of
from flashpoint_kernels.problems.reproducible import PART_SECONDS, sharing, split
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import check, normal, qkv

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9)
OPTIONS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": st.sampled_from([(-1, -1), (2, 1)]), "softcap": st.sampled_from([0.0, 2.0]),
     "dropout_p": st.sampled_from([0.0, 0.5])}
)  # fmt: skip


def problem_of(lengths, layout, heads, dim, dtype, mask, extras, seed=0):
    """Return the tensors of a gradient request for sequences with these lengths, packed or padded."""
    n, kv_heads = len(lengths), max(heads // 2, 1)
    longest = max(q for q, _ in lengths), max(k for _, k in lengths)
    t = qkv(n, heads, *longest, dim, kv_heads=kv_heads, dtype=dtype, seed=seed)
    if extras:
        t |= {"sinks": normal(heads, seed=seed), "alibi_slopes": normal(n, heads, seed=seed).abs()}
        t["offset"] = torch.arange(n) % 4 - 1
    if layout == "thd":
        packed = {name: [x[b, :, : lengths[b][name in "kv"]].transpose(0, 1) for b in range(n)]
                  for name, x in t.items() if name in ("q", "k", "v", "do")}  # fmt: skip
        t |= {name: torch.cat(pieces).contiguous() for name, pieces in packed.items()}
        for name, which in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            t[name] = torch.tensor([0, *[pair[which] for pair in lengths]]).cumsum(0)
        return t
    t |= {"q_lengths": torch.tensor([q for q, _ in lengths]), "kv_lengths": torch.tensor([k for _, k in lengths])}
    shapes = {"own": (n, heads, *longest), "shared": (1, *longest), "row": (n, 1, 1, longest[1])}
    if mask in shapes:
        t["attn_mask"] = normal(*shapes[mask], seed=seed + 1)
    if layout == "bshd":
        t |= {name: t[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "do")}
    return t


def alone_of(t, b, lengths, layout):
    """Return the tensors of sequence b alone."""
    if layout == "thd":
        starts = {"q": t["cu_seqlens_q"].tolist(), "k": t["cu_seqlens_k"].tolist()}
        sequence = {}
        for name, x in t.items():
            if name in ("q", "do", "k", "v", "o"):
                start = starts["k" if name in "kv" else "q"]
                sequence[name] = x[start[b] : start[b + 1]]
            elif name == "lse":
                sequence[name] = x[:, starts["q"][b] : starts["q"][b + 1]]
            elif name in ("alibi_slopes", "offset"):
                sequence[name] = x[b : b + 1]
            elif name == "sinks":
                sequence[name] = x
        return sequence | {f"cu_seqlens_{n}": torch.tensor([0, lengths[b][n == "k"]]) for n in "qk"}
    return {
        name: x if name == "sinks" or (name == "attn_mask" and x.ndim == 3) else x[b : b + 1] for name, x in t.items()
    }


def solved(t, options, direction, backend):
    problem = Problem.create(t, options, direction)
    for part in split(problem, backend):
        run_part(part, backend)
    return problem.outputs


any_problem = given(
    lengths=LENGTHS, layout=st.sampled_from(["bhsd", "bshd", "thd"]), heads=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([1, 8, 24]), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    mask=st.sampled_from(["none", "own", "shared", "row"]), extras=st.booleans(), options=OPTIONS,
    backend=st.sampled_from(["cpu", "tiled"]),
)  # fmt: skip


@any_problem
@example(  # one key/value head and one key: products of a matrix and a vector
    [(9, 1), (9, 1)], "bhsd", 2, 24, torch.float32, "none", True,
    {"causal": False, "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}, "tiled",
)  # fmt: skip
@settings(max_examples=25)
def test_bits_are_those_of_each_sequence_alone(lengths, layout, heads, dim, dtype, mask, extras, options, backend):
    """One request of many sequences has the bits of a separate request for each, in forward and gradients."""
    t = problem_of(lengths, layout, heads, dim, dtype, "none" if layout == "thd" else mask, extras)
    grads = ("dq", "dk", "dv", "dattn_mask") if mask in ("own", "row") and layout != "thd" else ("dq", "dk", "dv")
    given = Options(**options | ({"dropout_p": 0.0}), layout=layout, return_lse=True, grads=grads)
    inputs = {name: x for name, x in t.items() if name != "do"}
    if unsupported(backend, Problem.create(t, given, "backward").spec):
        backend = "tiled"
    o = solved(inputs, given, "forward", backend)
    grads = solved(t | o, given, "backward", backend)
    for b in range(len(lengths)):
        sequence = alone_of(t, b, lengths, layout)
        own_o = solved({n: x for n, x in sequence.items() if n != "do"}, given, "forward", backend)
        own_grads = solved(sequence | own_o, given, "backward", backend)
        expected = alone_of(t | o | grads, b, lengths, layout)
        for name, x in (own_o | own_grads).items():
            actual = grads[name] if name in grads else o[name]
            if layout != "thd":
                assert torch.equal(actual[b : b + 1], x), (name, b)
            elif name in expected:
                assert torch.equal(expected[name], x), (name, b)


SHORT = Sizes(
    q_len=st.integers(0, 9), kv_len=st.integers(0, 9), dim=st.just(8), value_dim=st.just(8), batch=st.integers(1, 9),
    kv_heads=st.just(1), group=st.just(2),
)  # fmt: skip


@given(
    problem=problems(SHORT, backward=True, windows=((-1, -1), (2, 1)), block_sizes=(None, None, None, (16, 16))),
    backend=st.sampled_from(["cpu", "tiled"]),
)  # fmt: skip
@settings(max_examples=25)
def test_answers_agree_with_float64(problem, backend):
    """Answers and every gradient agree with float64, for all options."""
    tensors, options = problem
    check(backend, tensors, **options)


@pytest.mark.slow
@any_problem
@settings(max_examples=300)
def test_bits_of_more_problems_are_those_of_each_sequence_alone(**drawn):
    test_bits_are_those_of_each_sequence_alone.hypothesis.inner_test(**drawn)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_a_request_of_many_sequences_is_cut_into_short_parts(backend):
    count = 4096
    t = {name: torch.zeros(count, 2, 1, 1) for name in "qkv"}
    problem = Problem.create(t, Options())
    parts = split(problem, backend)
    rows = [row for part in parts for row in part.rows]
    assert rows == list(problem.rows)
    rates = NOMINAL[backend]
    for part in parts:
        extent = extent_of(part.spec)._replace(sequences=len(part.rows), pairs=len(part.rows))
        assert seconds_of(part.spec, rates, extent) <= 1.1 * PART_SECONDS


def test_what_is_summed_over_sequences_is_not_cut_between_them():
    t = qkv(2048, 2, 4, 4, 8) | {"sinks": normal(2), "attn_mask": normal(4, 4)}
    for grads, cut in ((("dq",), True), (("dsinks",), False), (("dattn_mask",), False)):
        parts = split(Problem.create(t, Options(grads=grads), "backward"), "tiled")
        assert {len(part.rows) < 2048 for part in parts} == {cut}, grads
    masked = t | {"attn_mask": normal(2048, 1, 4, 4)}
    assert len(split(Problem.create(masked, Options(grads=("dattn_mask",)), "backward"), "tiled")) > 1


@pytest.mark.parametrize("mask", ["own", "row"])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_writes_the_answers_of_its_own_sequences_alone(backend, mask, dtype, monkeypatch):
    """Each part writes only the answers of its own sequences, so the parts may run in any order."""
    lengths = [(0, 3), (2, 3), (2, 0), (1, 3), (2, 3)]
    t = problem_of(lengths, "bhsd", 2, 8, dtype, mask, False)
    t["attn_mask"] = t["attn_mask"].to(dtype)
    options = Options(grads=("dq", "dk", "dv", "dattn_mask"))
    whole = Problem.create(t, options, "backward")
    run_part(whole, backend)
    monkeypatch.setattr(reproducible, "PART_SECONDS", 1e-9)
    for order in (1, -1):
        problem = Problem.create(t, options, "backward")
        parts = split(problem, backend)
        assert [len(part.rows) for part in parts if not part.first_head] == [1] * 5
        for part in parts[::order]:
            run_part(part, backend)
        for name, x in whole.outputs.items():
            assert torch.equal(problem.outputs[name], x), name


def test_only_sequences_of_one_thread_share_a_call():
    problem = Problem.create({name: torch.zeros(3, 1, 4096, 64) for name in "qkv"}, Options())
    assert sharing(problem, Row(0, 0, 0, 16, 4096, 0, 16, 4096, 0)) > 1
    assert sharing(problem, Row(0, 0, 0, 4096, 4096, 0, 4096, 4096, 0)) == 1


@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_a_price_follows_the_lengths_once_they_are_known(layout):
    lengths = [(3, 5), (3, 5), (0, 2), (7, 1)]
    t = problem_of(lengths, layout, 2, 8, torch.float32, "none", False)
    inputs = {name: x for name, x in t.items() if name != "do"}
    problem = Problem.create(inputs, Options(layout=layout))
    index = {name: x.tolist() for name, x in t.items() if name.startswith(("cu_", "q_l", "kv_l"))}
    exact, upper = extent_of(problem.spec, index), extent_of(problem.spec)
    assert exact == (4, 3, 2 * 15 + 7, 5 + 5 + 2 + 1)
    assert flops_of(problem.spec, exact.pairs) == problem.flops == 2 * 2 * exact.pairs * 16
    assert all(a <= b for a, b in zip(exact, upper, strict=True))
    for rates in NOMINAL.values():
        assert seconds_of(problem.spec, rates, exact) <= seconds_of(problem.spec, rates, upper)


def test_scores_of_zero_and_nan_and_minus_infinity_are_told_apart_in_every_sequence():
    """In sequences of one key, scores of 0, NaN and −∞ give the different answers of the reference."""
    t = {name: torch.zeros(5, 2, 3, 4) for name in "qkv"} | {"kv_lengths": torch.tensor([1, 1, 3, 1, 1])}
    t["v"] += 1.0
    t["q"][1, 0, 2] = torch.nan
    t["attn_mask"] = torch.zeros(5, 1, 3, 3)
    t["attn_mask"][3, 0, 1] = -torch.inf
    actual = solved(t, Options(return_lse=True), "forward", "cpu")
    expected = solved(t, Options(return_lse=True), "forward", "reference")
    for name, x in expected.items():
        assert torch.equal(actual[name].nan_to_num(9.0), x.nan_to_num(9.0)), name
    assert actual["lse"][1, 0, 2].isnan()
    assert actual["lse"][3, 1, 1] == -torch.inf
