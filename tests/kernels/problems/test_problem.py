"""In every layout, a `Problem` has views (H, S, D) of each sequence, and writes to these change its outputs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import Problem
from flashpoint_kernels.problems.problem import launch_key
from tests.support.kernels.solving import normal, poisoned

lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=6)


def made(pairs: list[tuple[int, int]], layout: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the tensors of a backward problem with these pairs of q_len and kv_len, and each sequence's (H, S, D)."""
    alone = [
        {name: normal(heads, n, 3, seed=9 * b + at) for at, (name, heads, n) in enumerate(
            (("q", 4, q_len), ("k", 2, kv_len), ("v", 2, kv_len), ("do", 4, q_len)))}
        for b, (q_len, kv_len) in enumerate(pairs)
    ]  # fmt: skip
    if layout == "thd":
        t = {name: torch.cat([x[name].transpose(0, 1) for x in alone]) for name in alone[0]}
        for name, which in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            t[name] = torch.tensor([0, *(pair[which] for pair in pairs)]).cumsum(0)
        return t, alone
    longest = {"q": max(q for q, _ in pairs), "k": max(k for _, k in pairs)}
    t = {}
    for name in alone[0]:
        length = longest["q" if name in ("q", "do") else "k"]
        t[name] = torch.stack([torch.nn.functional.pad(x[name], (0, 0, 0, length - x[name].shape[1])) for x in alone])
    if layout == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    index = {"q_lengths": [q for q, _ in pairs], "kv_lengths": [k for _, k in pairs]}
    return t | {name: torch.tensor(n) for name, n in index.items()}, alone


@given(pairs=lengths, layout=st.sampled_from(["bhsd", "bshd", "thd"]), together=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_batches_have_each_sequence_once_and_take_its_answers_back(
    pairs: list[tuple[int, int]], layout: str, together: int
) -> None:
    t, alone = made(pairs, layout)
    problem = poisoned(t, Options(layout=layout), "backward")
    problem.clear_outputs()
    seen: list[int] = []
    for rows, x in problem.batches(lambda row: together):
        assert 1 <= len(rows) <= together
        assert len({(row.q_len, row.kv_len) for row in rows}) == 1
        for n, row in enumerate(rows):
            seen.append(row.index)
            for name in ("q", "k", "v", "do"):
                assert torch.equal(x[name][n], alone[row.index][name]), name
                if name != "do":
                    x[f"d{name}"][n].copy_(alone[row.index][name] + 1)
    assert sorted(seen) == list(range(len(pairs)))
    for (row, x), expected in zip(problem.sequences(), alone, strict=True):
        for name in ("q", "k", "v"):
            assert torch.equal(x[f"d{name}"], expected[name] + 1), (row, name)
    assert all(torch.isfinite(answer).all() for answer in problem.outputs.values()), "padding is cleared"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_a_part_of_a_mask_is_that_of_its_sequences_and_is_written_back(own: bool, order: list[int]) -> None:
    t, _ = made([(3, 5)] * 3, "bhsd")
    mask = normal(3 if own else 1, 4, 3, 5, seed=50)
    options = Options(grads=("dattn_mask",))
    problem = Problem.create(t | {"attn_mask": mask}, options, "backward")
    rows: list[Row] = [problem.rows[n] for n in order]
    part = problem.mask_part(mask, rows)
    assert torch.equal(part, mask[order] if own else mask)
    grad = problem.outputs["dattn_mask"].zero_()
    problem.put_mask_part(grad, rows, problem.mask_part(grad, rows).copy_(part + 1))
    expected = torch.zeros_like(mask)
    expected[order if own else 0] = (mask[order] if own else mask[0]) + 1
    assert torch.equal(grad, expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 3), (0, 4)])
def test_parts_by_rows_and_heads_share_the_memory_of_the_whole(start: int, stop: int) -> None:
    t, alone = made([(2, 3), (4, 1), (0, 2), (1, 5)], "bhsd")
    problem = poisoned(t, Options(), "backward")
    part = problem.of_rows(start, stop).heads(1, 2)
    assert [row.index for row in part.rows] == list(range(start, stop))
    assert (part.spec.q_heads, part.spec.kv_heads, part.first_head) == (2, 1, 2)
    for row, x in part.sequences():
        assert torch.equal(x["q"], alone[row.index]["q"][2:])
        assert torch.equal(x["k"], alone[row.index]["k"][1:])
        x["dk"].fill_(7.0)
    written: Any = problem.outputs["dk"] == 7.0
    for b, pair in enumerate([(2, 3), (4, 1), (0, 2), (1, 5)]):
        assert int(written[b].sum()) == (3 * pair[1] if start <= b < stop else 0)
    assert not written[:, 0].any()


def test_lengths_batches_and_heads_are_free_in_a_launch() -> None:
    def spec_of(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **options: Any) -> Spec:
        infos = {name: TensorInfo("float32", shape) for name, shape in (("q", q), ("k", k), ("v", v))}
        return plan(infos, Options(**options), "forward")

    one = spec_of((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), causal=True)
    other = spec_of((7, 6, 3, 8), (7, 1, 90, 8), (7, 1, 90, 8), scale=2.0)
    assert launch_key(one, "tiled") == launch_key(other, "tiled")
    wider = spec_of((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 9))
    assert launch_key(one, "tiled") != launch_key(wider, "tiled")
