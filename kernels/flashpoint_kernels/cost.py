"""Predict how long a problem takes on a backend: what ranks requests, cuts them into parts and checks deadlines.

A prediction is a sum over a problem's sequences: seconds for each call of the backend's operators, for each sequence,
for each floating-point operation, and for each score with the options that touch it. `Rates` has the seconds of each;
flashpoint_kernels.calibration measures them on a device. No torch here: HTTP processes price requests from their heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import FEATURES

# Features that cost time for each score.
SCORE_FEATURES = tuple(name for name, (_, feature) in FEATURES.items() if feature.per_score)
BACKWARD = 3.0  # a gradient calls operators, and touches each score, that many times as often as a forward


class Rates(NamedTuple):
    """Seconds that one thread of a CPU, or a GPU, takes on one backend. `options` are seconds a score, by name."""

    call: float
    sequence: float
    flop: float
    score: float
    options: Mapping[str, float]


# Two cores of an AMD EPYC, one thread: what parts are cut by, so that they are the same on every machine.
NOMINAL: dict[str, Rates] = {
    "torch": Rates(1e-4, 1e-6, 2e-11, 4e-10, {"bool_mask": 1e-9, "float_mask": 1e-9, "alibi_slopes": 5e-10}),
    "tiled": Rates(5e-4, 3e-6, 2e-11, 2e-9,
                   {"softcap": 1e-9, "dropout": 2e-8, "bool_mask": 5e-10, "float_mask": 5e-10, "alibi_slopes": 5e-10}),
    "reference": Rates(1e-5, 4e-4, 5e-11, 2e-8,
                       {"softcap": 1e-8, "dropout": 3e-8, "bool_mask": 5e-9, "float_mask": 5e-9, "alibi_slopes": 1e-8}),
    "triton": Rates(5e-5, 1e-7, 5e-15, 0.0, {}),
}  # fmt: skip


class Extent(NamedTuple):
    """How much a problem asks: its sequences, the different pairs of lengths among them, and (query, key) pairs."""

    sequences: int
    lengths: int
    pairs: int


def extent_of(spec: Spec, index: Mapping[str, Any] | None = None) -> Extent:
    """Return the extent of a problem from the values of its index tensors, an upper bound without them.

    `index` has array-likes of integers, by name.
    """
    sequences = spec.batch
    if not (spec.ragged or spec.has("q_lengths") or spec.has("kv_lengths")):
        return Extent(sequences, min(sequences, 1), sequences * spec.q_len * spec.kv_len)
    if index is None:
        if spec.ragged:  # one sequence may have all queries and all keys
            return Extent(sequences, sequences, spec.q_len * spec.kv_len)
        choices = (spec.q_len + 1 if spec.has("q_lengths") else 1) * (spec.kv_len + 1 if spec.has("kv_lengths") else 1)
        return Extent(sequences, min(sequences, choices), sequences * spec.q_len * spec.kv_len)
    import numpy as np

    def lengths(name: str, starts: str, padded: int) -> np.ndarray[Any, Any]:
        if starts in spec.tensors:
            return np.diff(np.asarray(index[starts], np.int64))
        return np.asarray(index[name], np.int64) if name in index else np.full(sequences, padded, np.int64)

    q = lengths("q_lengths", "cu_seqlens_q", spec.q_len).clip(0, spec.q_len)
    k = lengths("kv_lengths", "cu_seqlens_k", spec.kv_len).clip(0, spec.kv_len)
    return Extent(sequences, len(np.unique(q * (spec.kv_len + 1) + k)), int((q * k).sum()))


def flops_of(spec: Spec, pairs: int) -> int:
    """Return the FLOPs of `pairs` (query, key) pairs of a problem, as `Spec.flops` counts them."""
    whole = spec.q_len * spec.kv_len * (1 if spec.ragged else spec.batch)
    return spec.flops * pairs // whole if whole else 0


def seconds_of(spec: Spec, rates: Rates, extent: Extent) -> float:
    """Return the predicted seconds of one thread for a problem of that extent."""
    return extent.lengths * rates.call * _ways(spec) + _seconds(spec, rates, extent.sequences, extent.pairs)


def row_seconds(spec: Spec, rates: Rates, row: Row) -> float:
    """Return the predicted seconds of one sequence among others of its lengths, without the call that they share."""
    return _seconds(spec, rates, 1, row.q_len * row.kv_len)


def _seconds(spec: Spec, rates: Rates, sequences: int, pairs: int) -> float:
    scores = pairs * spec.q_heads * _ways(spec)
    if spec.causal_square:
        scores /= 2
    each = rates.score + sum(rates.options.get(name, 0.0) for name in _options(spec))
    return sequences * rates.sequence * _ways(spec) + flops_of(spec, pairs) * rates.flop + scores * each


def _options(spec: Spec) -> Iterable[str]:
    return (name for name in SCORE_FEATURES if name in spec.features)


def _ways(spec: Spec) -> float:
    """How often a direction does what a forward does once."""
    return BACKWARD if spec.direction == "backward" else 1.0
