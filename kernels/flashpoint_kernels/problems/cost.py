"""Predict how long a problem takes on a backend. Predictions rank requests, cut them into parts and check deadlines.

A prediction is a sum over a problem's sequences: seconds for each call of the backend's operators, each sequence, each
floating-point operation, each score with the options that affect it, and each byte of keys and values. Scores that a
window or the diagonal hides do not count, except in the tiles at its edges, which are computed completely. `Rates`
contains the seconds; dispatching/calibration.py measures them on a device. This module does not import torch, because
HTTP processes, which do not load torch, predict the time of a request from its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashpoint_contract.options import UNBOUNDED
from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import FEATURES, ITEMSIZE

# Options and tensors that add a cost to each score.
SCORE_FEATURES = tuple(name for name, (_, feature) in FEATURES.items() if feature.per_score)
BACKWARD = 3.0  # a gradient makes this many times as many operator calls and score accesses as a forward
TILE = 64  # keys or queries: tiles at a window's edge are computed completely


class Rates(NamedTuple):
    """The seconds that one CPU thread or one GPU needs for each unit of work on one backend.

    `options` has, by name of an option or tensor, the seconds that it adds to each score. `types` has the seconds for
    each FLOP by the data type of q, for data types whose seconds differ from `flop`.
    """

    call: float
    sequence: float
    flop: float
    score: float
    options: Mapping[str, float]
    byte: float = 0.0  # for each byte of keys and values read from memory
    types: Mapping[str, float] = {}


# Measured with one thread on an AMD EPYC with two cores. All machines cut a problem into parts by these rates, so that
# the parts are the same on all machines.
NOMINAL: dict[str, Rates] = {
    "cpu": Rates(5e-5, 1e-6, 5e-12, 1e-9,
                 {"softcap": 4e-10, "dropout": 8e-10, "bool_mask": 6e-10, "float_mask": 6e-10, "alibi_slopes": 5e-10},
                 7e-11),
    "torch": Rates(5e-5, 1e-6, 5e-12, 0.0, {}, 7e-11),  # on a GPU
    "tiled": Rates(5e-4, 3e-6, 2e-11, 2e-9,
                   {"softcap": 1e-9, "dropout": 2e-8, "bool_mask": 5e-10, "float_mask": 5e-10, "alibi_slopes": 5e-10}),
    "reference": Rates(1e-5, 4e-4, 5e-11, 2e-8,
                       {"softcap": 1e-8, "dropout": 3e-8, "bool_mask": 5e-9, "float_mask": 5e-9, "alibi_slopes": 1e-8}),
    "triton": Rates(5e-5, 1e-7, 5e-15, 0.0, {}),
}  # fmt: skip


def nominal_option(backend: str, name: str) -> float:
    """Return the nominal seconds that an option or tensor of SCORE_FEATURES adds to each score.

    Raises LookupError that names the place of a missing figure.
    """
    known = NOMINAL[backend].options
    if name not in known:
        text = f"NOMINAL[{backend!r}] of {__name__} has no seconds for {name!r}, which has per_score=True"
        raise LookupError(f"{text}: add what it adds to the time of each score")
    return known[name]


class Extent(NamedTuple):
    """The size of a problem: how many sequences, different lengths, (query, key) pairs and keys it has.

    `lengths` counts the different combinations of a sequence's number of queries, number of keys and offset. For a
    `Spec.causal_square`, `pairs` is twice the number of computed pairs.
    """

    sequences: int
    lengths: int
    pairs: int
    keys: int = 0


def extent_of(spec: Spec, index: Mapping[str, Any] | None = None, *, hidden: bool = False) -> Extent:
    """Return the extent of a problem from the values of its index tensors; without them, an upper bound.

    `index` has integer arrays by name. With `hidden`, also count pairs that a window hides, for a backend that computes
    them.
    """
    sequences, keys = spec.batch, spec.batch * spec.kv_len
    whole = hidden or not _is_band(spec)
    if not (spec.ragged or any(map(spec.has, ("q_lengths", "kv_lengths", "offset")))):
        pairs = spec.q_len * spec.kv_len if hidden else pairs_of(spec, spec.q_len, spec.kv_len)
        return Extent(sequences, min(sequences, 1), sequences * pairs, keys)
    if index is None:
        if spec.ragged:  # a single sequence may have all queries and all keys
            pairs = spec.q_len * spec.kv_len
            if not whole:
                longest = spec.q_len if spec.paged else min(spec.q_len, spec.kv_len)
                pairs = min(pairs, longest * (sum(spec.window) + 1 + 2 * TILE) * _counted(spec))
            return Extent(sequences, sequences, pairs, keys if spec.paged else spec.kv_len)
        choices = (spec.q_len + 1 if spec.has("q_lengths") else 1) * (spec.kv_len + 1 if spec.has("kv_lengths") else 1)
        choices = sequences if spec.has("offset") else min(sequences, choices)
        pairs = spec.q_len * spec.kv_len if hidden else pairs_of(spec, spec.q_len, spec.kv_len)
        return Extent(sequences, choices, sequences * pairs, keys)
    import numpy as np

    def lengths(name: str, starts: str, padded: int) -> np.ndarray[Any, Any]:
        if starts in spec.tensors:
            return np.diff(np.asarray(index[starts], np.int64))
        return np.asarray(index[name], np.int64) if name in index else np.full(sequences, padded, np.int64)

    q = lengths("q_lengths", "cu_seqlens_q", spec.q_len).clip(0, spec.q_len)
    k = lengths("kv_lengths", "cu_seqlens_k", spec.kv_len).clip(0, spec.kv_len)
    offset: np.ndarray[Any, Any] = spec.offset(q, k)
    different = len(np.unique(q * (spec.kv_len + 1) + k))
    if spec.has("offset"):
        offset = np.broadcast_to(np.asarray(index["offset"], np.int64), sequences)
        different = len(set(zip(q.tolist(), k.tolist(), offset.tolist(), strict=True)))
    pairs = q * k if whole else np.minimum(_seen(spec, q, k, offset, np.clip) * _counted(spec), q * k)
    return Extent(sequences, different, int(pairs.sum()), int(k.sum()))


def _is_band(spec: Spec) -> bool:
    """Return whether a window or the diagonal hides pairs, other than the hidden half of a causal square."""
    (left, right), farthest = spec.window, UNBOUNDED if spec.has("offset") else spec.q_len + spec.kv_len
    return left < farthest or (right < farthest and not (spec.causal_square and right == 0))


def pairs_of(spec: Spec, q: int, k: int, offset: int | None = None) -> int:
    """Return the number of computed pairs in a sequence; for causal squares, twice that number (see `Extent`).

    `offset` is `Row.offset`. None is the default offset for these lengths; if there is a tensor `offset`, it is the
    offset with the most pairs.
    """
    if not _is_band(spec):
        return q * k
    if offset is None and spec.has("offset"):
        return min(q * k, min(q, k) * (sum(spec.window) + 1 + 2 * TILE))
    seen: int = _seen(spec, q, k, spec.offset(q, k) if offset is None else offset)
    return min(seen * _counted(spec), q * k)


def _counted(spec: Spec) -> int:
    """Return how many times `Extent.pairs` counts a visible pair: 2 for a `Spec.causal_square`, else 1."""
    return 2 if spec.causal_square else 1


def key_bytes(spec: Spec) -> int:
    """Return the bytes of one key and its value, for all heads."""
    return spec.kv_heads * (spec.head_dim + spec.value_dim) * ITEMSIZE[spec.tensors["k"].dtype]


def _clip(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def _seen(spec: Spec, q: Any, k: Any, offset: Any, clip: Callable[[Any, Any, Any], Any] = _clip) -> Any:
    """Return the number of pairs in a sequence's band, with complete tiles at its edges.

    Query i sees keys [i + offset − left, i + offset + right]. Arguments are numbers or arrays.
    """
    left, right = spec.window

    def below(first: Any) -> Any:
        """Return the sum over i in [0, q) of `first` + i, with each term limited to 0 … k."""
        rising = clip(-first, 0, q)  # the first query with a term above 0
        full = clip(k - first, rising, q)  # the first query with a term of k
        return (full - rising) * (2 * first + rising + full - 1) // 2 + (q - full) * k

    return below(offset + right + 1 + TILE) - below(offset - left - TILE)


def flops_of(spec: Spec, pairs: int) -> int:
    """Return the FLOPs for `pairs` (query, key) pairs of a problem, as `Spec.flops` counts them."""
    whole = spec.q_len * spec.kv_len * (1 if spec.ragged else spec.batch)
    return spec.flops * pairs // whole if whole else 0


def seconds_of(spec: Spec, rates: Rates, extent: Extent) -> float:
    """Return the predicted seconds of one thread for a problem of this extent."""
    return extent.lengths * rates.call * _ways(spec) + _seconds(
        spec, rates, extent.sequences, extent.pairs, extent.keys
    )


def row_seconds(spec: Spec, rates: Rates, row: Row) -> float:
    """Return the predicted seconds of one sequence, without the operator call that it shares with others."""
    return _seconds(spec, rates, 1, pairs_of(spec, row.q_len, row.kv_len, row.offset), row.kv_len)


def _seconds(spec: Spec, rates: Rates, sequences: int, pairs: int, keys: int) -> float:
    scores = pairs * spec.q_heads * _ways(spec)
    if spec.causal_square:
        scores /= 2
    each = rates.score + sum(rates.options.get(name, 0.0) for name in SCORE_FEATURES if name in spec.features)
    read = keys * key_bytes(spec) * _ways(spec)
    flop = rates.types.get(spec.dtype, rates.flop)
    seconds = sequences * rates.sequence * _ways(spec) + flops_of(spec, pairs) * flop + scores * each
    return seconds + read * rates.byte


def _ways(spec: Spec) -> float:
    """Return the work of this direction in units of a forward's work. Key weights need the scores a second time."""
    return BACKWARD if spec.direction == "backward" else 2.0 if spec.options.return_key_weights else 1.0
