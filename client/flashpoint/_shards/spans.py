"""Make the requests for a sequence whose keys lie in spans on several servers, and merge the answers. No I/O.

The queries are the last rows of the sequence: query i of n is at key total − n + i. A server that holds the span
[first, behind) knows only its own keys. With `bottom_right` it places query i at key (behind − first) − n + i of the
span. The correct place is further right by the number of keys after the span, `shift` = total − behind. So the window
in the request is moved right by `shift`.

A query is not sent if the left end of its window is after the span. Only the last queries can be left out. For each
query that is left out, the server places the other queries one key further right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashpoint._calls.arrays import to_numpy
from flashpoint._calls.service import checked
from flashpoint._shards.cut import UNBOUNDED, Band, Piece, Range
from flashpoint._shards.merge import _QUIET, _or_zero
from flashpoint._shards.problem import Numbers
from flashpoint.errors import all_invalid, invalid
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import refusals

TAKEN = ("attn_mask", "alibi_slopes", "sinks")
# Options that this module sets or refuses.
_OWN = {"causal", "causal_alignment", "window", "return_lse", "grads", "dropout_p", "dropout_seed"}


@dataclass(frozen=True)
class Queries:
    """The queries and options of a call: q (1,Hq,n,D). `tensors`: a mask of four dimensions, slopes and sinks (Hq,)."""

    q: Numbers
    options: AttentionOptions
    tensors: Mapping[str, Numbers]

    @classmethod
    def of(cls, q: Any, keywords: Mapping[str, Any]) -> Queries:
        """Check and convert the arguments of a call. Raises InvalidInputError, also for options that a server could
        apply only if it had the keys of the whole sequence.
        """
        given = {name: to_numpy(name, keywords[name]) for name in TAKEN if keywords.get(name) is not None}
        options = checked(AttentionOptions, {name: value for name, value in keywords.items() if name not in TAKEN})
        refused = refusals("sharded", (name for name in OPTIONS if getattr(options, name) != OPTIONS[name].default))
        if options.layout == "thd":
            refused.append(("layout", "must be bhsd or bshd: there is one sequence"))
        diagonal = options.causal or "alibi_slopes" in given or tuple(options.window) != (-1, -1)
        if options.causal_alignment != "bottom_right" and diagonal:
            refused.append(("causal_alignment", "must be bottom_right: the queries are the last tokens"))
        q = to_numpy("q", q)
        if q.ndim != 4 or q.shape[0] != 1:
            refused.append(("q", f"has shape {list(q.shape)}, and must be of one sequence, with four dimensions"))
        if refused:
            raise all_invalid(refused)
        q = _turned(q, options.layout)
        return cls(q, options, {name: _tensor(name, t, q.shape[1]) for name, t in given.items()})

    @property
    def heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def count(self) -> int:
        return int(self.q.shape[2])

    @property
    def bounds(self) -> tuple[int, int]:
        """Return how many keys a query sees left and right of its position; `UNBOUNDED` means all keys."""
        left, right = (UNBOUNDED if side < 0 else side for side in self.options.window)
        return left, min(right, 0) if self.options.causal else right

    def questions(self, total: int, spans: Iterable[Range]) -> Iterator[SpanQuestion]:
        """Yield the request for each span that at least one query sees.

        Raises InvalidInputError if the mask has too few columns.
        """
        mask = self.tensors.get("attn_mask")
        if mask is not None and 1 < mask.shape[3] < total:
            raise invalid("attn_mask", f"has {mask.shape[3]} columns where the cache has {total} tokens")
        for place, (first, behind) in enumerate(spans):
            question = self._question(place, first, behind, total - behind)
            if question.rows:
                yield question

    def _question(self, place: int, first: int, behind: int, shift: int) -> SpanQuestion:
        left, right = self.bounds
        rows = self.count if left >= shift else max(0, self.count - (shift - left))
        moved = shift - (self.count - rows)  # the server places these rows this many keys left of their true positions
        left, right = left - moved, right + moved
        length = behind - first
        options: dict[str, Any] = self.options.model_dump(exclude=_OWN, exclude_defaults=True)
        options |= {"return_lse": True, "causal": right == 0}
        options["window"] = (-1 if left >= length - 1 else left, -1 if right >= rows - 1 or right == 0 else right)
        return SpanQuestion(self, place, (first, behind), rows, moved, options)


class SpanQuestion(NamedTuple):
    """The request for span `place` with keys `keys`: the first `rows` queries, their windows moved right by `moved`."""

    call: Queries
    place: int
    keys: Range
    rows: int
    moved: int
    options: dict[str, Any]

    @property
    def q(self) -> Numbers:
        """Return the queries to send, in the caller's layout."""
        return _turned(self.call.q[:, :, : self.rows], self.call.options.layout)

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the options and tensors of the request, except q and sinks; the function `merged` adds the sinks."""
        given, (first, behind) = self.call.tensors, self.keys
        keywords: dict[str, Any] = dict(self.options)
        if (mask := given.get("attn_mask")) is not None:
            mask = mask[:, :, : self.rows] if mask.shape[2] > 1 else mask
            keywords["attn_mask"] = mask[..., first:behind] if mask.shape[3] > 1 else mask
        if "alibi_slopes" in given and self._knows_distances:
            keywords["alibi_slopes"] = given["alibi_slopes"]
        elif "alibi_slopes" in given:
            keywords["attn_mask"] = _with_columns(keywords.get("attn_mask"), self._bias())
        return keywords

    @property
    def pairs(self) -> int:
        """Return the number of visible (query, key) pairs over all heads."""
        n, (first, behind) = self.call.count, self.keys
        band = Band(n, behind - first, behind - first - self.rows + self.moved, *self.call.bounds)
        return band.pairs(Piece((0, self.rows), (0, behind - first), band.offset)) * self.call.heads

    # ALiBi subtracts slope·distance, and the server's distances are wrong if `moved` is not 0. There are three cases:
    # - One query: all keys are left of it, so the server's scores are all too large by slope·moved. This does not
    #   change o; `right_lse` corrects lse.
    # - Several queries, and all visible keys are left of them: the request has a mask of one row in place of the
    #   slopes, with −slope·(distance from the last key). `right_lse` subtracts the rest from lse.
    # - Otherwise the mask has a row for each query, with the true distances.

    @property
    def _knows_distances(self) -> bool:
        return not self.moved or self.rows == 1

    @property
    def _left(self) -> bool:
        """Return whether no query sees a key to the right of its own position."""
        return self.call.bounds[1] == 0 or self.moved >= self.rows - 1

    def _stand(self) -> Numbers:
        """Return the position of each query row, counted in keys from the start of the span."""
        return np.arange(self.rows) + (self.keys[1] - self.keys[0] - self.rows + self.moved)

    def _bias(self) -> Numbers:
        slopes = self.call.tensors["alibi_slopes"].astype(np.float64)[:, None, None]
        keys = np.arange(self.keys[1] - self.keys[0])
        distance = keys[-1:] - keys if self._left else np.abs(self._stand()[:, None] - keys)
        bias: Numbers = (-slopes * distance)[None].astype(np.float32)
        return bias

    def right_lse(self, lse: Numbers) -> Numbers:
        """Return the server's lse (1,Hq,rows), corrected to the ALiBi distances in the whole sequence, in float64."""
        lse = lse.astype(np.float64)
        if "alibi_slopes" not in self.call.tensors or not self._left:
            return lse
        slopes = self.call.tensors["alibi_slopes"].astype(np.float64)[:, None]
        if self._knows_distances:
            return lse - slopes * self.moved
        beyond: Numbers = self._stand() - (self.keys[1] - self.keys[0] - 1)
        return np.asarray(lse - slopes * beyond)


@_QUIET
def merged(
    call: Queries, answers: Sequence[tuple[SpanQuestion, Numbers, Numbers]], value_dim: int
) -> tuple[Numbers, Numbers]:
    """Merge the answers of the spans. Return o in q's dtype and the caller's layout, and lse (1,Hq,n) in float32."""
    heads, count = call.heads, call.count
    total = np.full((1, heads, count), -np.inf)
    parts = []
    for question, o, lse in answers:
        corrected = question.right_lse(lse)
        parts.append((question.rows, _turned(o, call.options.layout), corrected))
        total[..., : question.rows] = np.logaddexp(total[..., : question.rows], corrected)
    if "sinks" in call.tensors:
        total = np.logaddexp(total, call.tensors["sinks"].astype(np.float64)[:, None])
    whole = np.zeros((1, heads, count, value_dim), np.float32)
    for rows, o, corrected in parts:
        weight = np.exp(corrected - _or_zero(total[..., :rows])).astype(np.float32)
        whole[:, :, :rows] += weight[..., None] * o.astype(np.float32)
    return _turned(whole.astype(call.q.dtype, copy=False), call.options.layout), total.astype(np.float32)


def _with_columns(mask: Numbers | None, columns: Numbers) -> Numbers:
    if mask is None:
        return columns
    return np.where(mask, columns, -np.inf).astype(columns.dtype) if mask.dtype == np.bool_ else mask + columns


def _tensor(name: str, t: Numbers, heads: int) -> Numbers:
    if name == "attn_mask":
        return t.reshape((1,) * (4 - t.ndim) + t.shape)
    if t.shape != (heads,) and (name == "sinks" or t.shape != (1, heads)):
        raise invalid(name, f"shape {list(t.shape)} must be [{heads}]")
    return t.reshape(heads)


def _turned(t: Numbers, layout: str) -> Numbers:
    return t.swapaxes(1, 2) if layout == "bshd" else t
