"""Predict how long a problem takes on a backend: what ranks requests, cuts them into parts and checks deadlines.

A prediction is a sum over a problem's sequences: seconds for each call of the backend's operators, for each sequence,
for each floating-point operation, for each score with the options that touch it, and for each byte of keys and values.
Scores hidden by a window or the diagonal are not counted, except in the tiles at its edges, which are computed whole.
`Rates` has the seconds of each; flashpoint_kernels.calibration measures them on a device. No torch here: HTTP processes
price requests from their heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import FEATURES, ITEMSIZE

# Features that cost time for each score.
SCORE_FEATURES = tuple(name for name, (_, feature) in FEATURES.items() if feature.per_score)
BACKWARD = 3.0  # a gradient calls operators, and touches each score, that many times as often as a forward
TILE = 64  # keys or queries: a window's edge runs through tiles, which are computed whole


class Rates(NamedTuple):
    """Seconds that one thread of a CPU, or a GPU, takes on one backend. `options` are seconds a score, by name."""

    call: float
    sequence: float
    flop: float
    score: float
    options: Mapping[str, float]
    byte: float = 0.0  # of keys and values, read from memory


# Two cores of an AMD EPYC, one thread: what parts are cut by, so that they are the same on every machine.
NOMINAL: dict[str, Rates] = {
    "torch": Rates(1e-4, 1e-6, 2e-11, 4e-10, {"bool_mask": 1e-9, "float_mask": 1e-9, "alibi_slopes": 5e-10},
                   7e-11),
    "tiled": Rates(5e-4, 3e-6, 2e-11, 2e-9,
                   {"softcap": 1e-9, "dropout": 2e-8, "bool_mask": 5e-10, "float_mask": 5e-10, "alibi_slopes": 5e-10}),
    "reference": Rates(1e-5, 4e-4, 5e-11, 2e-8,
                       {"softcap": 1e-8, "dropout": 3e-8, "bool_mask": 5e-9, "float_mask": 5e-9, "alibi_slopes": 1e-8}),
    "triton": Rates(5e-5, 1e-7, 5e-15, 0.0, {}),
}  # fmt: skip


class Extent(NamedTuple):
    """How much a problem asks: its sequences, the different pairs of lengths among them, (query, key) pairs, and keys.

    Half of the pairs of a causal square are computed (`Spec.causal_square`).
    """

    sequences: int
    lengths: int
    pairs: int
    keys: int = 0


def extent_of(spec: Spec, index: Mapping[str, Any] | None = None, *, hidden: bool = False) -> Extent:
    """Return the extent of a problem from the values of its index tensors, an upper bound without them.

    `index` has array-likes of integers, by name. `hidden` counts the pairs that a window hides, too: for a backend that
    computes them.
    """
    sequences, keys = spec.batch, spec.batch * spec.kv_len
    whole = hidden or not _is_band(spec)
    if not (spec.ragged or spec.has("q_lengths") or spec.has("kv_lengths")):
        pairs = spec.q_len * spec.kv_len if hidden else pairs_of(spec, spec.q_len, spec.kv_len)
        return Extent(sequences, min(sequences, 1), sequences * pairs, keys)
    if index is None:
        if spec.ragged:  # one sequence may have all queries and all keys
            pairs = spec.q_len * spec.kv_len
            if not whole:
                most = spec.q_len if spec.paged else min(spec.q_len, spec.kv_len)
                pairs = min(pairs, most * (sum(spec.window) + 1 + 2 * TILE) * _counted(spec))
            return Extent(sequences, sequences, pairs, keys if spec.paged else spec.kv_len)
        choices = (spec.q_len + 1 if spec.has("q_lengths") else 1) * (spec.kv_len + 1 if spec.has("kv_lengths") else 1)
        pairs = spec.q_len * spec.kv_len if hidden else pairs_of(spec, spec.q_len, spec.kv_len)
        return Extent(sequences, min(sequences, choices), sequences * pairs, keys)
    import numpy as np

    def lengths(name: str, starts: str, padded: int) -> np.ndarray[Any, Any]:
        if starts in spec.tensors:
            return np.diff(np.asarray(index[starts], np.int64))
        return np.asarray(index[name], np.int64) if name in index else np.full(sequences, padded, np.int64)

    q = lengths("q_lengths", "cu_seqlens_q", spec.q_len).clip(0, spec.q_len)
    k = lengths("kv_lengths", "cu_seqlens_k", spec.kv_len).clip(0, spec.kv_len)
    pairs = q * k if whole else np.minimum(_seen(spec, q, k, np.clip) * _counted(spec), q * k)
    return Extent(sequences, len(np.unique(q * (spec.kv_len + 1) + k)), int(pairs.sum()), int(k.sum()))


def _is_band(spec: Spec) -> bool:
    """Whether a window or the diagonal may hide pairs, beyond the half of a causal square."""
    (left, right), farthest = spec.window, spec.q_len + spec.kv_len
    return left < farthest or (right < farthest and not (spec.causal_square and right == 0))


def pairs_of(spec: Spec, q: int, k: int) -> int:
    """Return how many pairs of a sequence's are computed, twice as many where half of them are counted."""
    return min(_seen(spec, q, k) * _counted(spec), q * k) if _is_band(spec) else q * k


def _counted(spec: Spec) -> int:
    """How often a pair that is seen is counted: twice where half of all are taken to be computed."""
    return 2 if spec.causal_square else 1


def key_bytes(spec: Spec) -> int:
    """Return the bytes of a key and its value, of all heads."""
    return spec.kv_heads * (spec.head_dim + spec.value_dim) * ITEMSIZE[spec.tensors["k"].dtype]


def _clip(x: int, least: int, most: int) -> int:
    return min(max(x, least), most)


def _seen(spec: Spec, q: Any, k: Any, clip: Callable[[Any, Any, Any], Any] = _clip) -> Any:
    """Return how many pairs the band of a sequence has, with whole tiles at its edges; of numbers, or of arrays.

    It never falls when q or k grows. Query i sees keys [i + offset − left, i + offset + right].
    """
    left, right = spec.window
    offset = k - q if spec.options.causal_alignment == "bottom_right" else 0 * k

    def below(first: Any) -> Any:
        """The sum over i in [0, q) of `first` + i, each no less than 0 and no more than k."""
        rising = clip(-first, 0, q)  # the first query that adds anything
        full = clip(k - first, rising, q)  # the first that adds k
        return (full - rising) * (2 * first + rising + full - 1) // 2 + (q - full) * k

    return below(offset + right + 1 + TILE) - below(offset - left - TILE)


def flops_of(spec: Spec, pairs: int) -> int:
    """Return the FLOPs of `pairs` (query, key) pairs of a problem, as `Spec.flops` counts them."""
    whole = spec.q_len * spec.kv_len * (1 if spec.ragged else spec.batch)
    return spec.flops * pairs // whole if whole else 0


def seconds_of(spec: Spec, rates: Rates, extent: Extent) -> float:
    """Return the predicted seconds of one thread for a problem of that extent."""
    return extent.lengths * rates.call * _ways(spec) + _seconds(
        spec, rates, extent.sequences, extent.pairs, extent.keys
    )


def row_seconds(spec: Spec, rates: Rates, row: Row) -> float:
    """Return the predicted seconds of one sequence among others of its lengths, without the call that they share."""
    return _seconds(spec, rates, 1, pairs_of(spec, row.q_len, row.kv_len), row.kv_len)


def _seconds(spec: Spec, rates: Rates, sequences: int, pairs: int, keys: int) -> float:
    scores = pairs * spec.q_heads * _ways(spec)
    if spec.causal_square:
        scores /= 2
    each = rates.score + sum(rates.options.get(name, 0.0) for name in _options(spec))
    read = keys * key_bytes(spec) * _ways(spec)
    seconds = sequences * rates.sequence * _ways(spec) + flops_of(spec, pairs) * rates.flop + scores * each
    return seconds + read * rates.byte


def _options(spec: Spec) -> Iterable[str]:
    return (name for name in SCORE_FEATURES if name in spec.features)


def _ways(spec: Spec) -> float:
    """How often a direction does what a forward does once."""
    return BACKWARD if spec.direction == "backward" else 1.0
