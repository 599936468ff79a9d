"""Attention of few queries over many keys, as in decoding: the CPU's operator reads the keys in place, at memory speed.

The query heads that share a key/value head become rows of one matrix, so each key is read once, not once per query
head. Keys are read in chunks of CHUNK, as if each chunk were a sequence, and the answers are merged by log-sum-exp. The
edges of chunks are fixed positions of a sequence. Keys in pages are read in place if a chunk of them is a view;
otherwise the chunk is copied together in the core's cache. float16 and bfloat16 are not converted: a conversion to
float32 takes longer than everything else.

The bits depend neither on the place of keys nor on what is computed together. The operator gives whole chunks the same
bits with any number of threads. The last chunk, of any length, gave other bits in 4 of 1,401 random cases, so it uses
one thread. One to three float32 query rows for a key/value head have a method of their own (thin.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.products import product
from flashpoint_kernels.reproducible import CHUNK, aligned, aligned_heads, exactly
from flashpoint_kernels.torch_backend.call import Call
from flashpoint_kernels.torch_backend.thin import is_thin, solve

_FEW_PAGES = 8  # of a chunk: each is copied separately
_ALIGNMENT = 64  # bytes, see `reproducible.aligned`

# k (m, H, c, D) and v (m, H, c, Dv): m chunks of c keys, of one sequence or of several
Run = tuple["Tensor | Copied", "Tensor | Copied"]


@dataclass(eq=False, slots=True)
class FewQueries:
    """Sequences of equal lengths whose queries, q (n, Hq, sq, D), see all `keys`."""

    q: Tensor
    keys: Lying | Paged
    scale: float  # above 0

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o (n, Hq, sq, Dv), in float32 or in q's dtype, and lse (n, Hq, sq)."""
        keys, dim = self.keys, self.q.shape[3]
        sequences, heads = keys.sequences, self.q.shape[0] * keys.k.shape[1]
        rows = aligned(self.q.reshape(sequences, heads // keys.sequences, -1, dim), self.q.dtype)
        whole, rest = divmod(keys.length, CHUNK)
        o: Tensor | None = None
        if whole:
            order, runs = keys.whole()
            if order is not None:
                every = rows[torch.tensor(order) // whole]
            else:
                every = rows.expand(whole, -1, -1, -1) if sequences == 1 else rows.repeat_interleave(whole, 0)
            o, lse, clean = self._solve(every, runs)
            if order is not None:
                places = torch.empty(len(order), dtype=torch.int64)
                places[order] = torch.arange(len(order))
                o, lse = o[places], lse[places]
            o, lse = o.view(sequences, whole, *o.shape[1:]), lse.reshape(sequences, whole, *lse.shape[1:])
        if rest:
            with exactly(1):
                last, last_lse, last_clean = self._solve(rows, keys.rest())
            if o is None:
                o, lse, clean = last[:, None], last_lse[:, None], last_clean
            else:
                o, lse = torch.cat([o, last[:, None]], 1), torch.cat([lse, last_lse[:, None]], 1)
                clean = clean and last_clean
        assert o is not None
        o, lse = (o, lse) if o.shape[1] == 1 else merged(o, lse, 1, clean)
        return o.reshape(*self.q.shape[:3], -1), lse.reshape(self.q.shape[:3])

    def _solve(self, rows: Tensor, runs: Iterable[Run]) -> tuple[Tensor, Tensor, bool]:
        """Return o (n, H, m, Dv) and lse (n, H, m) of rows (n, H, m, D), each over its own chunk; and if all have a
        largest score.
        """
        calls, answers, first, thin = [], [], 0, is_thin(rows, self.keys.k)
        for k, v in runs:
            asked = rows[first : first + len(k)]
            first += len(k)
            tasks = k.shape[1] * (len(k) if isinstance(k, Tensor) else 1)
            with exactly(1 if tasks == 1 else 0):  # inside a single task, BLAS's threads change bits
                if thin:
                    answers.append(solve(asked, k, v, self.scale))
                elif isinstance(k, Copied) or isinstance(v, Copied):  # the next copy overwrites it
                    every = zip(asked[:, None], k, v, strict=True)
                    answers += [Call(q_, k_[None], v_[None], None, False, self.scale).forward() for q_, k_, v_ in every]
                else:
                    turned = k.stride(0) < k.stride(1)  # a head's chunks are adjacent: they are read in a row
                    if turned:
                        asked, k, v = asked.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
                    call = Call(asked, k, v, None, False, self.scale)
                    o, lse = call.unchecked_cpu()
                    calls.append((call, o, lse))
                    answers.append((o.transpose(0, 1), lse.transpose(0, 1)) if turned else (o, lse))
        o, lse = _joined(answers)
        if lse.amin() > 0:  # usually; one operation, which finds 0, −∞ and NaN
            return o, lse, True
        if not lse.all():
            for call, *answer in calls:
                call.put_right(*answer)
            o, lse = _joined(answers)
        return o, lse, bool(lse.amin() > -torch.inf)


def _joined(answers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(answers) == 1:
        return answers[0]
    o, lse = (torch.cat(each) for each in zip(*answers, strict=True))
    return o, lse


class Lying(NamedTuple):
    """Keys and values in contiguous tensors: k (n, Hk, S, D) and v (n, Hk, S, Dv)."""

    k: Tensor
    v: Tensor

    @property
    def sequences(self) -> int:
        """Return n, or 1 if the memory of all sequences' heads looks like that of one sequence."""
        k, v = self.k, self.v
        one = k.stride(0) == k.shape[1] * k.stride(1) and v.stride(0) == v.shape[1] * v.stride(1)
        return 1 if one else k.shape[0]

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def whole(self) -> tuple[None, Iterator[Run]]:
        """Return the runs of whole chunks, sequence by sequence."""
        return None, self._runs(0, self.length // CHUNK, CHUNK)

    def rest(self) -> Iterator[Run]:
        rest = self.length % CHUNK
        return self._runs(self.length - rest, 1, rest)

    def _runs(self, start: int, chunks: int, count: int) -> Iterator[Run]:
        sequences = self.sequences
        for n in range(sequences):
            k, v = (_chunks(t, n, t.shape[0] // sequences, start, chunks, count) for t in (self.k, self.v))
            if _in_place(k) and _in_place(v):
                yield k, v
                continue
            for chunk in range(chunks):
                own = slice(chunk, chunk + 1)
                yield aligned_heads(k[own], k.dtype), aligned_heads(v[own], v.dtype)


class Paged(NamedTuple):
    """Keys and values in pages k (pool, Hk, page_size, D) and v; `numbers` holds the page numbers of each sequence."""

    k: Tensor
    v: Tensor
    numbers: list[list[int]]
    length: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, table: Tensor, rows: Sequence[Row]) -> Paged:
        count = -(-rows[0].kv_len // k.shape[2])
        return cls(k, v, [table[row.index, :count].tolist() for row in rows], rows[0].kv_len)

    @property
    def sequences(self) -> int:
        return len(self.numbers)

    def whole(self) -> tuple[list[int] | None, Iterator[Run]]:
        """Return the runs of whole chunks, and the index of each chunk; None means the order of the sequences.

        Chunks that are views come in the order of their pages, from any sequence, so that a run has as many as
        possible.
        """
        places = self._places(range(0, self.length - CHUNK + 1, CHUNK), CHUNK)
        if not all(place.lies for place in places):
            return None, self._runs(places)
        order = sorted(range(len(places)), key=places.__getitem__)
        return order, self._runs([places[n] for n in order])

    def rest(self) -> Iterator[Run]:
        """Return the runs of each sequence's last chunk."""
        rest = self.length % CHUNK
        return self._runs(self._places([self.length - rest], rest))

    def _places(self, starts: Sequence[int], count: int) -> list[_Place]:
        """Return the places of `count` keys of each sequence, from each of `starts` on."""
        size = self.k.shape[2]
        in_place = _in_place(self.k) and _in_place(self.v)
        as_one = all(t.stride(0) == size * t.stride(2) for t in (self.k, self.v))  # consecutive pages are contiguous
        places = []
        for numbers in self.numbers:
            for start in starts:
                first, inside = divmod(start, size)
                own = numbers[first : -(-(start + count) // size)]
                lies = in_place and (len(own) == 1 or (as_one and _is_row(own)))
                places.append(_Place(own[0], inside, count, lies, own))
        return places

    def _runs(self, places: Iterable[_Place]) -> Iterator[Run]:
        """Yield the chunks of keys at these places; views at equal steps come together, and so do copies."""
        copies: list[Copied] = []  # of k and of v; all of them have the same memory
        for lies, own in groupby(places, lambda place: place.lies):
            if not lies:
                copies = copies or [Copied.of(self.k), Copied.of(self.v)]
                some = tuple(own)
                yield replace(copies[0], places=some), replace(copies[1], places=some)
                continue
            views: _Views | None = None
            for place in own:
                longer = None if views is None else views.longer(place)
                if views is not None and longer is None:
                    yield views.of(self.k), views.of(self.v)
                views = longer or _Views(place.page, place.inside, place.length)
            if views is not None:
                yield views.of(self.k), views.of(self.v)


class _Place(NamedTuple):
    """`length` keys from `inside` of `page` on, the first of `numbers`; `lies` is true if they are a view."""

    page: int
    inside: int
    length: int
    lies: bool
    numbers: Sequence[int]


class _Views(NamedTuple):
    """`chunks` chunks of `length` keys in pages: the place of the first, and the step to the next."""

    page: int
    place: int
    length: int
    chunks: int = 1
    step: tuple[int, int] = (0, 0)

    def longer(self, next: _Place) -> _Views | None:
        """Return these views and one more, or None if it is not at the same step as the others."""
        done = self.chunks - 1
        step = next.page - self.page - done * self.step[0], next.inside - self.place - done * self.step[1]
        if min(step) < 0 or (done and step != self.step):
            return None
        return self._replace(chunks=self.chunks + 1, step=step)

    def of(self, t: Tensor) -> Tensor:
        page, head, row, column = t.stride()
        first = t.storage_offset() + self.page * page + self.place * row
        strides = self.step[0] * page + self.step[1] * row, head, row, column
        return t.as_strided((self.chunks, t.shape[1], self.length, t.shape[3]), strides, first)


@dataclass(frozen=True, eq=False, slots=True)
class Copied:
    """Chunks of pages (pool, H, page_size, D), in place of a tensor (m, H, c, D): each is copied when it is its turn.

    The next copy overwrites it, so the memory stays in the core's cache.
    """

    pages: Tensor
    rows: _Rows | None
    places: Sequence[_Place]
    held: dict[int, Tensor]  # the memory, by the number of pages

    @classmethod
    def of(cls, pages: Tensor) -> Copied:
        """Return no chunks yet."""
        return cls(pages, _Rows.of(pages), (), {})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.places), self.pages.shape[1], self.places[0].length, self.pages.shape[3]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, some: slice) -> Copied:
        return replace(self, places=self.places[some])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each chunk (H, c, D)."""
        return map(self._copy, self.places)

    def _copy(self, place: _Place) -> Tensor:
        t, (_, inside, count, _, numbers) = self.pages, place
        _, heads, size, dim = t.shape
        if (held := self.held.get(len(numbers))) is None:
            held = self.held[len(numbers)] = t.new_empty(heads, len(numbers), size, dim)
        if _is_row(numbers):
            held.copy_(t[numbers[0] : numbers[-1] + 1].transpose(0, 1))
        elif len(numbers) <= _FEW_PAGES or self.rows is None:
            for n, number in enumerate(numbers):
                held[:, n] = t[number]
        else:
            self.rows.select(numbers, held)
        return aligned_heads(held.view(heads, -1, dim)[:, inside : inside + count], t.dtype)


class _Rows(NamedTuple):
    """Pages as a matrix: a row is a page of one head, or one key of one head. Selecting rows copies memory."""

    matrix: Tensor
    places: Tensor  # of the rows of page 0: (H, 1) or (H, 1, page_size)
    page: int  # the number of rows from a page to the next

    @classmethod
    def of(cls, t: Tensor) -> _Rows | None:
        """Return the matrix; None if the strides of the pages (pool, H, page_size, D) do not allow it."""
        pool, heads, size, dim = t.shape
        page, head, row, column = t.stride()
        together = row == dim
        if column != 1 or head < dim or page % head or not (together or row % head == 0):
            return None
        index = torch.arange(heads)[:, None]
        if not together:
            index = index[..., None] + torch.arange(size) * (row // head)
        count = (pool - 1) * (page // head) + int(index[-1, -1].max()) + 1
        width = size * dim if together else dim
        return cls(t.as_strided((count, width), (head, 1), t.storage_offset()), index, page // head)

    def select(self, numbers: Sequence[int], out: Tensor) -> None:
        """Copy the pages with these `numbers` into `out` (H, n, page_size, D)."""
        first = torch.tensor(numbers) * self.page
        index = self.places + (first if self.places.ndim == 2 else first[:, None])
        torch.index_select(self.matrix, 0, index.flatten(), out=out.view(-1, self.matrix.shape[1]))


def _chunks(t: Tensor, first: int, sequences: int, start: int, chunks: int, count: int) -> Tensor:
    """Return a view (chunks, H, count, D) of t (n, Hk, S, D): all heads of some sequences, keys from `start` on."""
    sequence, head, row, column = t.stride()
    shape = chunks, sequences * t.shape[1], count, t.shape[3]
    return t.as_strided(shape, (count * row, head, row, column), t.storage_offset() + first * sequence + start * row)


def _in_place(t: Tensor) -> bool:
    """Return whether the operator may read t (…, c, D) in place: rows may have gaps, but each must be aligned."""
    *outer, column = t.stride()
    return column == 1 and not t.data_ptr() % _ALIGNMENT and not any(n * t.itemsize % _ALIGNMENT for n in outer)


def _is_row(numbers: Sequence[int]) -> bool:
    return numbers[-1] - numbers[0] == len(numbers) - 1 and all(b - a == 1 for a, b in pairwise(numbers))


def merged(o: Tensor, lse: Tensor, chunks: int, clean: bool) -> tuple[Tensor, Tensor]:
    """Return the answers o (…, Dv) and lse (…) over all keys from those over chunks, each weighted by its share of the
    softmax.

    The chunks are dimension `chunks` of o and lse. `clean` is true if no lse is −∞. Sums run in an order that depends
    only on the number of chunks; that of torch's `sum` depends on other sizes, too.
    """
    each, answers = lse.movedim(chunks, -1).contiguous(), o.movedim(chunks, -2)
    most = each.amax(-1, keepdim=True)
    if not clean:
        most = most.clamp(min=torch.finfo(torch.float32).min)  # instead of the −∞ of a query without a score
    shares = (each - most).exp_()
    total = shares.cumsum(-1)[..., -1:]
    o = product(shares.view(-1, 1, each.shape[-1]), answers.reshape(-1, *answers.shape[-2:]).float())
    o = o.view(*each.shape[:-1], o.shape[-1])
    o /= total if clean else total.masked_fill(total == 0, 1.0)
    return o, (total.log() + most)[..., 0]
