"""Cost estimates follow the computed work: query-key pairs inside the window, and bytes of the keys that are read."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_contract.options import Options
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import NOMINAL, TILE, extent_of, flops_of, pairs_of, seconds_of

TYPES = ("float32", "float16", "bfloat16")


def spec_of(
    q_len: int, kv_len: int, *, batch: int = 1, lengths: bool = False, offset: bool = False, **options: Any
) -> Spec:
    q, k = (TensorInfo("float32", (batch, 2, n, 16)) for n in (q_len, kv_len))
    infos = {"q": q, "k": k, "v": k}
    if lengths:
        infos |= dict.fromkeys(("q_lengths", "kv_lengths"), TensorInfo("int64", (batch,)))
    if offset:
        infos["offset"] = TensorInfo("int64", ())
    return plan(infos, Options(**options), "forward")


def ragged(q_len: int, kv_len: int, sequences: int, **options: Any) -> Spec:
    q, k = (TensorInfo("float32", (n, 2, 16)) for n in (q_len, kv_len))
    starts = TensorInfo("int32", (sequences + 1,))
    infos = {"q": q, "k": k, "v": k, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return plan(infos, Options(layout="thd", **options), "forward")


windows = st.sampled_from([(-1, -1), (0, 0), (5, 3), (300, -1), (-1, 40), (700, 0)])
alignments = st.sampled_from(["bottom_right", "top_left"])
sizes = st.integers(0, 700)


def counted(q: int, k: int, window: tuple[int, int], causal: bool, offset: int) -> int:
    """Count the query-key pairs in the band, extended by TILE keys at each of its two edges, by a test of each pair."""
    left, right = (10**6 if w < 0 else w for w in window)
    right = min(right, 0) if causal else right
    ahead = np.arange(k)[None] - (np.arange(q)[:, None] + offset)
    return int(((ahead >= -left - TILE) & (ahead <= right + TILE)).sum())


@given(q=sizes, k=sizes, window=windows, causal=st.booleans(), alignment=alignments)
@settings(max_examples=60, deadline=None)
def test_pairs_are_those_of_the_band_and_the_tiles_at_its_edges(
    q: int, k: int, window: tuple[int, int], causal: bool, alignment: str
) -> None:
    spec = spec_of(q, k, window=window, causal=causal, causal_alignment=alignment)
    expected = counted(q, k, window, causal, k - q if alignment == "bottom_right" else 0)
    if spec.causal_square:  # `Spec.flops` takes half of the pairs here, so `pairs_of` doubles them
        expected = min(2 * expected, q * k)
    assert pairs_of(spec, q, k) == expected
    assert extent_of(spec).pairs == expected
    assert extent_of(spec, hidden=True).pairs == q * k


@given(q=sizes, k=sizes, window=windows, causal=st.booleans(), offset=st.integers(-900, 900))
@settings(max_examples=60, deadline=None)
def test_pairs_follow_an_offset_once_it_is_known(
    q: int, k: int, window: tuple[int, int], causal: bool, offset: int
) -> None:
    spec = spec_of(q, k, window=window, causal=causal, offset=True)
    exact, upper = extent_of(spec, {"offset": np.array(offset)}), extent_of(spec)
    assert exact.pairs == pairs_of(spec, q, k, offset) == counted(q, k, window, causal, offset)
    assert exact.pairs <= upper.pairs <= extent_of(spec, hidden=True).pairs == q * k


@given(
    lengths=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5), window=windows, causal=st.booleans(),
    alignment=alignments, packed=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_price_never_grows_when_lengths_are_known_and_no_shorter_sequence_costs_more(
    lengths: list[tuple[int, int]], window: tuple[int, int], causal: bool, alignment: str, packed: bool
) -> None:
    options = {"window": window, "causal": causal, "causal_alignment": alignment}
    q, k = ([pair[n] for pair in lengths] for n in (0, 1))
    if packed:
        spec = ragged(sum(q), sum(k), len(lengths), **options)
        index = {name: np.cumsum([0, *n]) for name, n in (("cu_seqlens_q", q), ("cu_seqlens_k", k))}
    else:
        spec = spec_of(max(q), max(k), batch=len(lengths), lengths=True, **options)
        index = {"q_lengths": np.array(q), "kv_lengths": np.array(k)}
    exact, upper = extent_of(spec, index), extent_of(spec)
    assert exact.pairs == sum(pairs_of(spec, *pair) for pair in lengths)
    assert exact.pairs <= upper.pairs
    assert exact.keys == sum(k) <= upper.keys
    assert seconds_of(spec, NOMINAL["cpu"], exact) <= seconds_of(spec, NOMINAL["cpu"], upper)
    for q_len, kv_len in lengths:
        assert (
            pairs_of(spec, q_len, kv_len) <= pairs_of(spec, q_len + 1, kv_len) <= pairs_of(spec, q_len + 1, kv_len + 1)
        )


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_a_window_lowers_the_price_by_what_it_hides(backend: str) -> None:
    def seconds(**options: Any) -> float:
        spec = spec_of(4096, 4096, **options)
        return seconds_of(spec, NOMINAL[backend], extent_of(spec))

    assert seconds(window=(100, 100)) < 0.15 * seconds()
    assert seconds(window=(100, 0), causal=True) < 0.2 * seconds(causal=True)
    assert seconds(window=(4095, 4095)) == seconds()
    spec = spec_of(4096, 4096, window=(100, 100))
    assert flops_of(spec, extent_of(spec).pairs) < 0.1 * spec.flops


def test_one_query_costs_what_its_keys_take_to_read() -> None:
    """With one query and 67 MFLOP, more than 0.7 of the estimated time is for reading 134 MB of keys and values."""
    infos = {"q": TensorInfo("float32", (8, 8, 1, 64)), "k": TensorInfo("float32", (8, 8, 4096, 64))}
    spec = plan(infos | {"v": infos["k"]}, Options(), "forward")
    rates = NOMINAL["cpu"]
    read = 2 * 8 * 8 * 4096 * 64 * 4 * rates.byte
    seconds = seconds_of(spec, rates, extent_of(spec))
    assert seconds > read > 0.7 * seconds


def test_a_type_has_the_price_of_its_own_kernel() -> None:
    """The estimate uses the rate of the data type if `rates.types` has one (bfloat16 with AMX), else `rates.flop`."""
    rates = NOMINAL["cpu"]._replace(types={"bfloat16": NOMINAL["cpu"].flop / 4})
    wide, wider = (
        {name: plan(dict.fromkeys("qkv", TensorInfo(name, (1, 2, 512, dim))), Options(), "forward") for name in TYPES}
        for dim in (64, 128)
    )

    def products(name: str) -> float:
        """Return how many seconds the matrix products take longer with head dim 128 than 64: other costs are equal."""
        own = [seconds_of(spec[name], rates._replace(byte=0), extent_of(spec[name])) for spec in (wide, wider)]
        return own[1] - own[0]

    assert products("float16") == products("float32") == pytest.approx(4 * products("bfloat16"))
