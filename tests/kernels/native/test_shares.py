"""The forward is divided into about equal shares, whatever the number of threads, which leaves the bits alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import Options, attention
from flashpoint_kernels.native.forward import TASK, Forward, Queries
from flashpoint_kernels.native.rows import CHUNK, UNBOUNDED, ByteSteps, QuerySteps, Rows, Spans
from tests.support.kernels.solving import qkv


def forward_of(lengths: Sequence[tuple[int, int]], heads: int, causal: bool) -> Forward:
    """Return a forward that is divided, but not computed, so that no address is real."""
    t = {name: torch.empty(1, heads, 1, 64, dtype=torch.float32) for name in ("q", "k", "v", "o")}
    spec = plan({name: TensorInfo("float32", tuple(t[name].shape)) for name in "qkv"}, Options(), "forward")
    spans = Spans(np.zeros((1, 8), np.int64), 1, torch.float32, k_step=256, v_step=256)
    forward = Forward(Queries(spec, t), [spans])
    steps = ByteSteps(1 << 20, 256)
    for number, (queries, keys) in enumerate(lengths):
        high = keys - queries + 1 if causal else UNBOUNDED
        at = 4096 * (number + 1)
        rows = Rows(at, at, 0, QuerySteps(steps, steps), queries, 0, keys, at, keys, high=high, sequence=number)
        forward.rows += rows.tiles(1, 0)
    return forward


def chunks(tasks: Sequence[int]) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Yield each chunk of a share, as its sequence, first query, head and number, with its count of scores."""
    for at in range(0, len(tasks), len(TASK)):
        task = dict(zip(TASK, tasks[at : at + len(TASK)], strict=True))
        for head in range(task["first_head"], task["first_head"] + task["heads"]):
            for chunk in range(task["start"] // CHUNK, max(task["start"] // CHUNK + 1, -(-task["stop"] // CHUNK))):
                keys = min(task["stop"], (chunk + 1) * CHUNK) - max(task["start"], chunk * CHUNK)
                yield (task["sequence"], task["first_query"], head, chunk), task["own.queries"] * max(1, keys)


@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 40, 384, 385, 2048]), st.sampled_from([1, 1000, 1024, 1025, 2048, 5000])),
        min_size=1, max_size=4,
    ),
    heads=st.integers(1, 8), causal=st.booleans(), workers=st.sampled_from([1, 2, 3, 8, 32, 96, 255]),
)  # fmt: skip
def test_shares_have_each_chunk_once_and_about_equal_work(
    lengths: list[tuple[int, int]], heads: int, causal: bool, workers: int
) -> None:
    """The largest share exceeds the mean by less than the largest unit that is computed whole, or chunk."""
    forward = forward_of(lengths, heads, causal)
    shares, _ = forward.shares(workers)
    assert len(shares) <= workers
    found = [list(chunks(share)) for share in shares]
    every = Counter(name for share in found for name, _ in share)
    assert set(every.values()) == {1}
    assert len(every) == heads * sum(row.chunks for row in forward.rows if isinstance(row, Rows))
    total = sum(scores for share in found for _, scores in share)
    whole = forward.units >= 4 * workers
    largest = max(
        row.pairs if whole else max(scores for share in found for _, scores in share)
        for row in forward.rows
        if isinstance(row, Rows)
    )
    assert max(sum(scores for _, scores in share) for share in found) <= total / workers + largest


@pytest.mark.slow
@pytest.mark.parametrize("threads", [8, 32, 96])
def test_bits_are_the_same_with_more_threads_than_cores(threads: int) -> None:
    before = torch.get_num_threads()
    for q_len, kv_len, causal in ((1, 9000, False), (1100, 2100, True), (2500, 2500, True)):
        t = {name: x.requires_grad_() for name, x in qkv(1, 2, q_len, kv_len, 64).items() if name in "qkv"}

        def answers(count: int, t: dict[str, torch.Tensor] = t, causal: bool = causal) -> list[torch.Tensor]:
            torch.set_num_threads(count)
            o = attention(t["q"], t["k"], t["v"], causal=causal)
            return [o, *torch.autograd.grad(o.sum(), list(t.values()))]

        try:
            expected, found = answers(1), answers(threads)
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (q_len, kv_len)
