"""Run the tile loop over the cells that a block mask does not hide completely (see cells.py), for one sequence.

A strip is a row of cells: of queries in the forward, of keys in the backward. Several strips are computed in parallel:
wave w of a group of strips contains the w-th cell of each strip, at any position, and is one batched product. So a
sparse mask needs few operators. The arithmetic is that of tiles.py. Strips are numbered through all heads. Shapes, for
cells of m queries and n keys, and u cells in a wave:

    q, dq  (Hq·strips, m, D)     do  (Hq·strips, m, Dv)     k, dk  (Hk·strips, n, D)     v, dv  (Hk·strips, n, Dv)
    scores of a wave  (u, m, n)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint_contract.spec import Row
from flashpoint_contract.tensors import SCALES
from flashpoint_kernels.problems.dropout import kept_bits
from flashpoint_kernels.problems.problem import Problem, narrowed
from flashpoint_kernels.problems.reproducible import aligned
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.tiled_backend.arithmetic import add_product, product, shaped, tanh_
from flashpoint_kernels.tiled_backend.cells import Cells, Flags, Group, Numbers, groups

INF = float("inf")
_WAVE = 1 << 20  # maximum scores in a wave
_OF_HEAD = 1 << 18  # maximum scores of one head in a wave
_LEAST = torch.finfo(torch.float32).min  # replaces −∞ as the largest score of a row that has seen no key


def forward(problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> None:
    """Write `o` and `lse` for sequences of equal lengths. `x` are their tensors, see `Problem.batches`."""
    for t in _sequences(problem, rows, x):
        _forward(t, *(x[name][t.nth] if name in x else None for name in ("o", "lse")))


def backward(problem: Problem, rows: Sequence[Row], x: dict[str, Tensor], out: dict[str, Tensor]) -> None:
    """Write dq, dk and dv of `out`, and add to its dsinks (Hq,) and dattn_mask (n|1, Hq|1, sq|1, sk|1)."""
    for t in _sequences(problem, rows, x):
        _backward(t, {name: tensor[t.nth] for name, tensor in x.items() if name in ("do", "o", "lse", "dlse")}, out)


def _sequences(problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> Iterator[Strips]:
    blocks = problem.block_part(rows)
    flags = blocks.cpu().numpy()
    for n, row in enumerate(rows):
        nth_mask = n if len(flags) > 1 else 0
        yield Strips.of(problem, row, n, blocks[nth_mask], Cells.of(flags[nth_mask], problem.spec, row), x)


def _forward(t: Strips, o: Tensor | None, lse: Tensor | None) -> None:
    whole = t.q.new_zeros(*t.q.shape[:2], t.v.shape[-1])
    of_all = t.sinks[:, None].expand(-1, t.q.shape[1]).contiguous()
    memory = t.memory()
    for strips, waves in t.groups(t.seen):
        places = t.index(strips)
        q, m = t.q.index_select(0, places), of_all.index_select(0, places)[..., None]
        total = (m > -INF).float()  # a sink counts as a key with value 0 that was processed before
        acc = q.new_zeros(len(strips), q.shape[1], whole.shape[-1])
        for keys in waves:
            u = len(keys)
            s, _ = t.scores(strips[:u], keys, q[:u], t.keys(keys), memory)
            m_new = torch.maximum(m[:u], s.amax(-1, keepdim=True))
            base = m_new.clamp(min=_LEAST)
            decay = (m[:u] - base).exp_()
            p = s.sub_(base).exp_()
            total[:u].mul_(decay).add_(p.sum(-1, keepdim=True))
            if t.dropout_p:
                t.drop(strips[:u], keys, p, p)
            add_product(acc[:u].mul_(decay), p, t.values(keys))
            m[:u] = m_new
        whole.index_copy_(0, places, acc.div_(total.masked_fill(total == 0, 1.0).mul_(1.0 - t.dropout_p)))
        of_all.index_copy_(0, places, (m.clamp_(min=_LEAST) + total.log_())[..., 0])
    if o is not None:
        o.copy_(t.rows_of(whole))
    if lse is not None:
        lse.copy_(t.rows_of(of_all[..., None])[..., 0])


def _backward(t: Strips, x: dict[str, Tensor], out: dict[str, Tensor]) -> None:
    do, lse = x["do"].float(), x["lse"].float()
    delta = (x["o"].float() * do).sum(-1)
    if "dlse" in x:
        delta = delta - x["dlse"].float().masked_fill(lse == -INF, 0.0)
    # An lse of +∞ makes the probabilities exp(s − lse) equal to 0. It replaces −∞, and fills the rows after the last
    # query.
    lse = lse.masked_fill(lse == -INF, INF)
    if "dsinks" in out:
        sinks = t.sinks.view(len(lse), -1)[:, :1]
        out["dsinks"] -= (torch.exp(sinks - lse) * delta).sum(1)
    if not out.keys() - {"dsinks"}:
        return
    do, delta = t.in_strips(do / (1.0 - t.dropout_p)), t.in_strips(delta[..., None])
    lse = t.in_strips(lse[..., None], INF)
    dq, dk, dv = (torch.zeros_like(each) for each in (t.q, t.k, t.v))
    memory, more = t.memory(), t.memory()
    other_memory = torch.empty_like(memory) if t.dropout_p else memory
    for keys, waves in t.groups(t.seen.swapaxes(1, 2)):
        places = t.index(keys)
        k, v = t.k.index_select(0, places), t.v.index_select(0, places)
        own_dk, own_dv = torch.zeros_like(k), torch.zeros_like(v)
        for strips in waves:
            u, at = len(strips), t.index(strips)
            q, do_u, lse_u, delta_u = (each.index_select(0, at) for each in (t.q, do, lse, delta))
            s, slope = t.scores(strips, keys[:u], q, k[:u], memory, with_slope=True)
            p = s.sub_(lse_u).exp_()
            kept = t.drop(strips, keys[:u], p, shaped(other_memory, p.shape)) if t.dropout_p else p
            add_product(own_dv[:u], kept.mT, do_u)
            dp = product(do_u, v[:u].mT, shaped(more, p.shape))
            ds = dp.mul_(kept).addcmul_(p, delta_u, value=-1.0) if t.dropout_p else dp.sub_(delta_u).mul_(p)
            if "dattn_mask" in out:
                t.add_to_mask(strips, keys, ds, out["dattn_mask"])
            if slope is not None:
                ds.mul_(slope)
            _add_each(dq, at, product(ds, k[:u]))
            add_product(own_dk[:u], ds.mT, q)  # q is already multiplied by the scale
        dk.index_copy_(0, places, own_dk)
        dv.index_copy_(0, places, own_dv)
    if "dq" in out:
        out["dq"][t.nth].copy_(t.rows_of(dq.mul_(t.scale)))
    for name, gradient in (("dk", dk), ("dv", dv)):
        if name in out:
            out[name][t.nth].copy_(gradient.view(t.problem.spec.kv_heads, -1, gradient.shape[-1])[:, : t.row.kv_len])


def _add_each(whole: Tensor, at: Tensor, parts: Tensor) -> None:
    """Add parts, in order, to the strips with the indices `at`, which may contain duplicates."""
    if whole.is_cuda:
        for strip, part in zip(at.tolist(), parts, strict=True):
            whole[strip] += part
    else:
        whole.index_add_(0, at, parts)


@dataclass(frozen=True, eq=False)
class Strips:
    """One sequence of a call, cut into strips. q is already scaled.

    `seen` marks the cells to compute: (Hk, strips of the query heads of a key head, strips of keys). `tested` marks the
    cells with hidden scores: (Hq·strips, strips of keys).
    """

    problem: Problem
    row: Row
    nth: int
    blocks: Tensor  # (Hq|1, blocks of queries, blocks of keys)
    cells: Cells
    seen: Flags
    tested: Flags
    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None  # (Hk·strips, n|1)
    v_scale: Tensor | None
    sinks: Tensor  # (Hq·strips,); −∞ without sinks
    slopes: Tensor | None  # (Hq·strips,)
    mask: Tensor | None  # (Hq|1, sq|1, sk|1), bool or float
    apart: Tensor  # (m, n) int32: column minus row

    @classmethod
    def of(cls, problem: Problem, row: Row, nth: int, blocks: Tensor, cells: Cells, x: dict[str, Tensor]) -> Strips:
        spec, (m, n) = problem.spec, cells.size
        shape = (spec.q_heads, *cells.some.shape[1:])
        seen, tested = (np.broadcast_to(t, shape) for t in (cells.some, cells.cut | cells.edge))
        q = _in_cells(aligned(x["q"][nth], torch.float32) * spec.scale, m)
        k, v = (_in_cells(aligned(t[nth], t.dtype if spec.quantized else torch.float32), n) for t in (x["k"], x["v"]))
        k_scale, v_scale = (_scales(x[name][nth], n, shape[2]) if spec.quantized else None for name in SCALES)
        sinks = x["sinks"].float() if "sinks" in x else q.new_full((spec.q_heads,), -INF)
        slopes = x.get("alibi_slopes")
        if slopes is not None:
            slopes = (slopes if slopes.ndim == 1 else slopes[nth]).repeat_interleave(shape[1])
        mask = problem.tensors.get("attn_mask")
        i, j = (torch.arange(size, dtype=torch.int32, device=q.device) for size in (m, n))
        return cls(
            problem, row, nth, blocks, cells,
            seen.reshape(spec.kv_heads, math.prod(shape[:2]) // spec.kv_heads, shape[2]),
            tested.reshape(math.prod(shape[:2]), shape[2]),
            q, k, v, k_scale, v_scale, sinks=sinks.repeat_interleave(shape[1]), slopes=slopes,
            mask=None if mask is None else problem.mask_part(mask, [row])[0], apart=j - i[:, None],
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return self.problem.spec.scale

    @property
    def dropout_p(self) -> float:
        return self.problem.spec.options.dropout_p

    def groups(self, seen: Flags) -> Iterator[Group]:
        """Return the groups of strips of `seen`, whose axis 1 has strips of queries or strips of keys."""
        cell = math.prod(self.cells.size)
        each = max(1, min(_OF_HEAD // cell, seen.shape[1]))
        # with several threads, the order of BLAS' sums could depend on the number of strips
        several = self.q.is_cuda or torch.get_num_threads() == 1
        return groups(seen, each, max(1, _WAVE // cell // each) if several else 1)

    def memory(self) -> Tensor:
        """Return memory for the scores of a wave."""
        cell = math.prod(self.cells.size)
        return self.q.new_empty(min(max(_WAVE // cell, 1), max(len(self.q), len(self.k))) * cell)

    def index(self, strips: Numbers) -> Tensor:
        return torch.from_numpy(strips).to(self.q.device)

    def keys(self, strips: Numbers) -> Tensor:
        """Return the keys of strips, (u, n, D) float32."""
        return self._of_strips(self.k, self.k_scale, strips)

    def values(self, strips: Numbers) -> Tensor:
        """Return the values of strips, (u, n, Dv) float32."""
        return self._of_strips(self.v, self.v_scale, strips)

    def _of_strips(self, t: Tensor, scale: Tensor | None, strips: Numbers) -> Tensor:
        at = self.index(strips)
        chosen = t.index_select(0, at)
        return chosen if scale is None else scaled(chosen, scale.index_select(0, at))

    def in_strips(self, t: Tensor, filling: float = 0.0) -> Tensor:
        """Return (Hq, sq, X) as (Hq·strips, m, X)."""
        return _in_cells(t, self.cells.size[0], filling)

    def rows_of(self, t: Tensor) -> Tensor:
        """Return (Hq·strips, m, X) as (Hq, sq, X), without the rows that fill the last strip."""
        return t.view(self.problem.spec.q_heads, -1, t.shape[-1])[:, : self.row.q_len]

    def scores(
        self, strips: Numbers, keys: Numbers, q: Tensor, k: Tensor, memory: Tensor, with_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores (u, m, n) of u cells, in `memory`; hidden scores are −∞.

        `strips` and `keys` are the indices of the cells' strips of queries and of keys, whose rows are q and k. With
        `with_slope`, also return softcap's slope ds/d(scale·q·k), None without softcap. See also `Tiles.scores`.
        """
        softcap = self.problem.spec.options.softcap
        s = product(q, k.mT, shaped(memory, (len(keys), *self.cells.size)))
        slope = None
        if softcap:
            tanh_(s.div_(softcap))
            slope = torch.addcmul(s.new_ones(()), s, s, value=-1.0) if with_slope else None
            s.mul_(softcap)
        if self.slopes is not None:
            ahead = self.apart + self.index(self._ahead(strips, keys)).int()[:, None, None]
            s.addcmul_(self.slopes[self.index(strips)][:, None, None], ahead.abs_().float(), value=-1.0)
        tested = self.tested[strips, keys % self.tested.shape[1]]
        for n in np.flatnonzero(tested) if self.mask is None else range(len(keys)):
            self._hide(s[n], int(strips[n]), int(keys[n]))
        return s, slope

    def _ahead(self, strips: Numbers, keys: Numbers) -> Numbers:
        """Return j − (i + offset) for the first query i and first key j of each cell."""
        _, of_queries, of_keys = self.cells.some.shape
        ahead: Numbers = keys % of_keys * self.cells.size[1] - strips % of_queries * self.cells.size[0]
        return ahead - self.row.offset

    def _place(self, strip: int, key: int) -> tuple[int, slice, slice]:
        """Return a cell's query head, its queries and its keys; indices beyond the last query or key are cut off."""
        (_, of_queries, of_keys), (m, n), row = self.cells.some.shape, self.cells.size, self.row
        i0, j0 = strip % of_queries * m, key % of_keys * n
        return strip // of_queries, slice(i0, min(i0 + m, row.q_len)), slice(j0, min(j0 + n, row.kv_len))

    def _hide(self, s: Tensor, strip: int, key: int) -> None:
        """Add the mask to a cell's scores (m, n), and set the scores of invisible keys to −∞."""
        head, i, j = self._place(strip, key)
        inside = s[: i.stop - i.start, : j.stop - j.start]
        if self.mask is not None:
            blocks = _part(self.mask, head, i, j)
            if blocks.dtype == torch.bool:
                inside.masked_fill_(~blocks, -INF)
            else:
                inside.add_(narrowed(blocks) if blocks.dtype == torch.float64 else blocks)
        cells, (rows, columns) = self.cells, self.problem.spec.options.block_size
        place = i.start // cells.size[0], j.start // cells.size[1]
        if cells.edge[place]:
            (left, right), ahead = self.problem.spec.window, j.start - i.start - self.row.offset
            s.masked_fill_((self.apart < -left - ahead) | (self.apart > right - ahead), -INF)
            s[:, j.stop - j.start :] = -INF
        if cells.cut[(head if len(cells.cut) > 1 else 0, *place)]:
            blocks = self.blocks[head if len(self.blocks) > 1 else 0]
            at_i, at_j = (torch.arange(each.start, each.stop, dtype=torch.int64, device=s.device) for each in (i, j))
            inside.masked_fill_(~blocks[(at_i // rows)[:, None], at_j // columns], -INF)

    def drop(self, strips: Numbers, keys: Numbers, p: Tensor, out: Tensor) -> Tensor:
        """Write to `out` the probabilities `p` (u, m, n) of cells, with 0 for the dropped ones."""
        seed, (m, n) = self.problem.seed, self.cells.size
        assert seed is not None, "a problem with dropout has a seed"
        of = zip(strips.tolist(), keys.tolist(), p.view(torch.int32), out.view(torch.int32), strict=True)
        for strip, key, weights, kept in of:
            head, i, j = self._place(strip, key)
            head = self.problem.query_heads[head]
            tile = range(head, head + 1), range(i.start, i.start + m), range(j.start, j.start + n)
            bits = kept_bits(seed, self.dropout_p, [self.row.index], *tile, p.device)
            torch.bitwise_and(weights, bits[0], out=kept)
        return out

    def add_to_mask(self, strips: Numbers, keys: Numbers, ds: Tensor, whole: Tensor) -> None:
        """Add the contributions of cells to a mask's gradient (n|1, Hq|1, sq|1, sk|1)."""
        of_sequence = whole[self.nth if len(whole) > 1 else 0]
        for strip, key, ds_of_cell in zip(strips.tolist(), keys.tolist(), ds, strict=False):
            head, i, j = self._place(strip, key)
            part = _part(of_sequence, head, i, j)
            part += ds_of_cell[: i.stop - i.start, : j.stop - j.start].sum_to_size(part.shape)


def _in_cells(t: Tensor, size: int, filling: float = 0.0) -> Tensor:
    """Return (…, S, X) as (…·strips, size, X); rows beyond S, at the end of the last strip, are `filling`."""
    missing = -t.shape[-2] % size
    whole = pad(t, (0, 0, 0, missing), value=filling) if missing else t
    return whole.reshape(-1, size, t.shape[-1])


def _scales(scale: Tensor, size: int, strips: int) -> Tensor:
    """Return scales (Hk, sk|1) as (Hk·strips, size|1)."""
    if scale.shape[1] == 1:
        return scale.repeat_interleave(strips, 0)
    return _in_cells(scale[..., None], size)[..., 0]


def _part(t: Tensor, head: int, i: slice, j: slice) -> Tensor:
    """Return a cell's part of a mask (Hq|1, sq|1, sk|1): (m|1, n|1)."""
    of_head = t[head if len(t) > 1 else 0]
    return of_head[i if of_head.shape[0] > 1 else slice(None), j if of_head.shape[1] > 1 else slice(None)]
