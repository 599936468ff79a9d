"""Problems with random page sizes, page numbers, shared pages and strides have the bits of problems without pages."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.serving import DTYPES, of_eight_bits
from tests.support.kernels.solving import forward, normal

BACKENDS = ["cpu", "tiled", "reference", "triton"]


@st.composite
def serving(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Draw (a problem without pages, the same problem with shared and strided pages, the layout of the latter)."""
    size, pool, pages = draw(st.integers(1, 20)), draw(st.integers(1, 6)), draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, size * pages), min_size=1, max_size=4))
    layout, eight = draw(st.sampled_from(["bhsd", "bshd", "thd"])), draw(st.sampled_from([None, *DTYPES]))
    q_len, step = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    k, v = (normal(pool * step, size, 2, 8, seed=seed + n)[::step] for n in range(2))
    t = {"k": k, "v": v}
    if eight is not None:
        t = of_eight_bits(t, "bshd", eight)
        if step > 1:  # a cache has other data between its pages
            t = {n: torch.stack([x, x], 1)[:, 0] for n, x in t.items()}
    numbers = draw(st.lists(st.integers(0, pool - 1), min_size=len(lengths) * pages, max_size=len(lengths) * pages))
    table = torch.tensor(numbers, dtype=torch.int32).view(len(lengths), pages)
    q = normal(len(lengths), q_len, 4, 8, seed=seed + 9)
    dense = {"q": q, "kv_lengths": torch.tensor(lengths)}
    for name, x in t.items():  # copies one key at a time
        unpaged = x.new_zeros(len(lengths), size * pages, *x.shape[2:])
        for b, length in enumerate(lengths):
            for j in range(length):
                unpaged[b, j] = x[int(table[b, j // size]), j % size]
        dense[name] = unpaged
    for b, length in enumerate(lengths):
        table[b, -(-length // size) :] = draw(st.sampled_from([-1, 0, pool, 2**31 - 1, -(2**31)]))
    paged = {"q": q, "kv_lengths": dense["kv_lengths"], "block_table": table, **t}
    if layout == "bhsd":
        dense, paged = ({n: _transposed(n, x) for n, x in given.items()} for given in (dense, paged))
    if layout == "thd":
        paged |= {"q": q.flatten(0, 1), "cu_seqlens_q": torch.arange(len(lengths) + 1) * q_len}
    return dense, paged, layout


def _transposed(name: str, t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2) if name in ("q", "k", "v", "k_scale", "v_scale") else t


@pytest.mark.slow
@given(problem=serving(), causal=st.booleans(), backend=st.sampled_from(BACKENDS))
@settings(max_examples=60, deadline=None)
def test_any_pages(problem: Any, causal: bool, backend: str) -> None:
    dense, paged, layout = problem
    expected = forward(backend, dense, layout="bhsd" if layout == "bhsd" else "bshd", causal=causal)
    actual = forward(backend, paged, layout=layout, causal=causal)
    if layout == "thd":
        expected = {"o": expected["o"].flatten(0, 1), "lse": expected["lse"].transpose(0, 1).flatten(1)}
    for name, t in actual.items():
        assert torch.equal(t, expected[name]), name
