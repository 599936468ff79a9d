"""FlashAttention's tile loop in plain torch: all options, any device, O(N) extra memory.

It follows FlashAttention-2 (Dao 2023), Algorithms 1 and 2. Forward: for a tile of queries, loop over the tiles of keys
that it may see, and keep a running maximum m, a running sum l and an unnormalised output. Backward: recompute each
tile's probabilities from `lse`; with delta = rowsum(o∘do) − dlse, ds = P∘(dP − delta) gives all gradients.

All arithmetic is float32. The query heads that share a key/value head are stacked into the rows of one matrix product,
so grouped heads need no copy of k or v. Short sequences of equal lengths are computed together, like additional heads.
Shapes, for n sequences and a tile of bm queries and bn keys (G = Hq / Hk):

    q, dq  (n·Hk, G, sq, D)     do  (n·Hk, G, sq, Dv)     a tile's rows  (n·Hk, G·bm, D|Dv)
    k, dk  (n·Hk, sk, D)        v, dv  (n·Hk, sk, Dv)     a tile's scores  (n·Hq, bm, bn)

8-bit keys and values are converted to float32 tile by tile, each time a tile is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems import bounds
from flashpoint_kernels.problems.dropout import kept_bits, room_for
from flashpoint_kernels.problems.masks import added, outside
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.problems.reproducible import aligned, can_be_cut, flushing, sharing, threads
from flashpoint_kernels.problems.sequences import parted
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.tiled_backend import blocks
from flashpoint_kernels.tiled_backend.arithmetic import add_product, product, shaped, tanh_

INF = float("inf")

# Queries × keys of a tile of one head; if one product computes several heads, their queries together are this many (see
# `Tiles.block`). 256 × 512 would fit a core's cache, but then operators are so short that threads compete for Python's
# lock, and a call takes 25% longer (2 cores, heads computed in parallel, Sq = Sk = 2048, 8 heads, D 64, softcap).
FORWARD_TILE = (512, 512)
BACKWARD_TILE = (1024, 256)
# With dropout a tile needs about ten times as many operators, so larger tiles are faster. At the same sizes, the
# forward took 290 to 310 ms with the tiles above and 215 to 225 ms with these tiles; the backward took 390 to 440 and
# 315 to 330 ms.
DROPOUT_FORWARD_TILE = (1024, 1024)
DROPOUT_BACKWARD_TILE = (2048, 512)
_EDGES = 4  # maximum cached masks of tiles at the edges of the window
_TILE_SCORES = 1 << 18  # maximum scores, of all heads, of sequences that are computed together
# Minimum queries of a head in a tile. With fewer, a batched product of 32 heads takes 20% longer than one product with
# as many rows.
_FEWEST_QUERIES = 16


def forward(problems: Sequence[Problem], tile: tuple[int, int] | None = None) -> None:
    """Compute forwards. `tile` replaces the queries and keys of a tile of one head."""
    for problem in problems:
        problem.clear_outputs()
        for rows, x in with_queries(problem):
            with threads(problem, rows[0]) as count, flushing(problem, count):
                if problem.spec.has("block_mask"):
                    blocks.forward(problem, rows, x)
                else:
                    _forward(Tiles.of(problem, rows, x), x.get("o"), x.get("lse"), tile)


def backward(problems: Sequence[Problem], tile: tuple[int, int] | None = None) -> None:
    """Compute gradients. `tile`: see `forward`."""
    for problem in problems:
        problem.clear_outputs()
        # dsinks and a broadcast dattn_mask are sums over sequences or heads. They are computed in float32: in the
        # output if it has this dtype, else in new memory, and rounded at the end. A dattn_mask with one element per
        # score is no sum, and is written directly to the output.
        shared: dict[str, Tensor] = {
            name: problem.own_part(name).float().zero_()
            for name in ("dattn_mask", "dsinks")
            if name in problem.outputs and not (name == "dattn_mask" and _own_mask(problem))
        }
        for rows, x in with_queries(problem):
            with threads(problem, rows[0]) as count, flushing(problem, count):
                outputs: dict[str, Tensor] = {name: x[name] for name in ("dq", "dk", "dv") if name in x}
                if "dsinks" in shared:
                    outputs["dsinks"] = shared["dsinks"]
                if "dattn_mask" in problem.outputs:
                    mask = shared.get("dattn_mask", problem.outputs["dattn_mask"])
                    outputs["dattn_mask"] = problem.mask_part(mask, rows)
                if problem.spec.has("block_mask"):
                    blocks.backward(problem, rows, x, outputs)
                else:
                    _backward(Tiles.of(problem, rows, x), x, outputs, tile)
                if "dattn_mask" in outputs:
                    problem.put_mask_part(mask, rows, outputs["dattn_mask"])
        for name, total in shared.items():
            if total.dtype != problem.outputs[name].dtype:
                problem.own_part(name).copy_(total)


def _own_mask(problem: Problem) -> bool:
    """Return whether `attn_mask` has one element per score (no broadcasting), and no block mask skips scores."""
    if problem.spec.has("block_mask"):
        return False
    return problem.tensors["attn_mask"].numel() == math.prod(problem.spec.shape_of("attn_mask"))


def with_queries(problem: Problem) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
    """Return `Problem.batches` without sequences that have no queries: `clear_outputs` has written their outputs."""

    def most(row: Row) -> int:
        scores = problem.spec.q_heads * row.q_len * max(row.kv_len, 1)
        return min(sharing(problem, row), max(1, _TILE_SCORES // scores)) if row.q_len else 0

    return problem.batches(most)


def _forward(t: Tiles, o: Tensor | None, lse: Tensor | None, tile: tuple[int, int] | None) -> None:
    block_m, block_n = t.block(tile or (DROPOUT_FORWARD_TILE if t.dropout_p else FORWARD_TILE))
    memory, room = t.memory(block_m, block_n), t.room(block_m, block_n)
    for i0, i1 in steps(0, t.q_len, block_m):
        q = t.queries(t.q, i0, i1)
        # A sink counts as a key with value 0 that is processed before the first key.
        m = t.sinks.repeat(1, i1 - i0, 1)
        total = (m > -INF).float()
        acc = q.new_zeros(*q.shape[:2], t.v.shape[-1])
        for j0, j1 in steps(*t.key_range(i0, i1), block_n):
            s, _ = t.scores(q, i0, i1, j0, j1, memory, memory)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = _finite(m_new)
            decay = m.sub_(base).exp_()
            p = s.sub_(base).exp_()  # not exp2_: its bits depend on the element's position in the tensor
            total.mul_(decay).add_(p.sum(-1, keepdim=True))
            if room is not None:
                t.drop(p, i0, i1, j0, j1, room, p)
            add_product(acc.mul_(decay.view(*acc.shape[:2], 1)), p.view(*acc.shape[:2], -1), t.values(j0, j1))
            m = m_new
        if o is not None:
            kept = total.masked_fill(total == 0, 1.0).mul_(1.0 - t.dropout_p)
            o[:, :, i0:i1] = parted(acc.view(t.heads, i1 - i0, -1).div_(kept), 0, t.each)
        if lse is not None:
            lse[:, :, i0:i1] = parted((_finite(m) + total.log())[..., 0], 0, t.each)


def _backward(t: Tiles, x: dict[str, Tensor], out: dict[str, Tensor], tile: tuple[int, int] | None) -> None:
    """Write dq, dk and dv into `out`, and add to its dsinks (Hq,).

    Write dattn_mask if it has one element per score; add to it if it is broadcast (n|1, Hq|1, sq|1, sk|1).
    """
    do = t.grouped(x["do"])
    delta = (t.grouped(x["o"]) * do).sum(-1).view(t.heads, -1, 1)
    lse = x["lse"].float().reshape(t.heads, -1, 1)
    if "dlse" in x:
        delta = delta - x["dlse"].float().reshape(lse.shape).masked_fill(lse == -INF, 0.0)
    # With lse = +∞ instead of −∞, a row that sees no key gets probabilities exp(s − lse) of 0.
    lse = torch.where(lse == -INF, INF, lse)
    if "dsinks" in out:
        out["dsinks"] -= (torch.exp(t.sinks - lse) * delta).sum((1, 2)).view(t.each).sum(0)
    if not out.keys() - {"dsinks"}:
        return
    dq = torch.zeros_like(t.q) if "dq" in out else None
    if t.dropout_p:
        do = do / (1.0 - t.dropout_p)  # dropout scales the kept probabilities by this factor
    block_m, block_n = t.block(tile or (DROPOUT_BACKWARD_TILE if t.dropout_p else BACKWARD_TILE))
    memory, more = t.memory(block_m, block_n), t.memory(block_m, block_n)
    room = t.room(block_m, block_n)
    other_memory = memory if room is None else torch.empty_like(memory)
    tangents = torch.empty_like(memory) if t.softcap else memory
    own_mask = "dattn_mask" in out and _own_mask(t.problem)
    for j0, j1 in steps(0, t.kv_len, block_n):
        k, v = t.keys(j0, j1), t.values(j0, j1)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        first, end = t.query_range(j0, j1)
        if own_mask:
            for unseen in (slice(0, first), slice(max(first, end), None)):
                out["dattn_mask"][:, :, unseen, j0:j1] = 0.0
        for i0, i1 in steps(first, end, block_m):
            q, do_i = t.queries(t.q, i0, i1), t.queries(do, i0, i1)
            shape = (*q.shape[:2], j1 - j0)
            s, tanh = t.scores(q, i0, i1, j0, j1, memory, tangents)
            p = s.sub_(lse[:, i0:i1]).exp_()
            kept = p if room is None else t.drop(p, i0, i1, j0, j1, room, shaped(other_memory, p.shape))
            if "dv" in out:
                add_product(dv, kept.view(shape).mT, do_i)
            if not out.keys() & {"dq", "dk", "dattn_mask"}:
                continue
            dp = product(do_i, v.mT, shaped(more, shape)).view(s.shape)
            if room is None:
                ds = dp.sub_(delta[:, i0:i1]).mul_(p)
            else:
                ds = dp.mul_(kept).addcmul_(p, delta[:, i0:i1], value=-1.0)
            if own_mask:
                out["dattn_mask"][:, :, i0:i1, j0:j1] = parted(ds, 0, t.each)
            elif "dattn_mask" in out:
                part, ds_of_heads = part_of(out["dattn_mask"], i0, i1, j0, j1), parted(ds, 0, t.each)
                # Sum within each sequence first: then its sum has the same bits, whatever other sequences there are.
                part += ds_of_heads.sum_to_size(ds_of_heads.shape[0], *part.shape[1:]).sum_to_size(part.shape)
            if tanh is not None:
                torch.ops.aten.tanh_backward.grad_input(ds, tanh, grad_input=ds)
            if dq is not None:
                dq[:, :, i0:i1] += product(ds.view(shape), k).view(*dq.shape[:2], i1 - i0, -1)
            if "dk" in out:
                add_product(dk, ds.view(shape).mT, q)  # q contains the scale, divided by softcap
        if t.softcap:
            dk.mul_(t.softcap)
        for name, grad in (("dk", dk), ("dv", dv)):
            if name in out:
                out[name][:, :, j0:j1] = parted(grad, 0, (len(t.rows), t.problem.spec.kv_heads))
    if dq is not None:
        out["dq"].copy_(dq.mul_(t.scale).view(*t.each, t.q_len, -1))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Sequences of equal lengths, ready to be cut into tiles: their float32 tensors and masks.

    q is already multiplied by the scale and divided by softcap. If there are scales, k and v are 8-bit numbers.
    """

    problem: Problem
    rows: Sequence[Row]
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor  # (n·Hq, 1, 1); −∞ without sinks
    slopes: Tensor | None  # (n·Hq, 1, 1)
    mask: Tensor | None  # (n|1, Hq|1, sq|1, sk|1), bool or float
    offset: int
    k_scale: Tensor | None  # (n·Hk, sk|1)
    v_scale: Tensor | None
    edges: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # cached results of `edge`

    @classmethod
    def of(cls, problem: Problem, rows: Sequence[Row], x: dict[str, Tensor]) -> Tiles:
        spec, row, count = problem.spec, rows[0], len(rows)
        q = aligned(x["q"], torch.float32) * (spec.scale / (spec.options.softcap or 1.0))
        sinks = x["sinks"].repeat(count) if "sinks" in x else q.new_full((count * spec.q_heads,), -INF)
        mask = problem.tensors.get("attn_mask")
        return cls(
            problem,
            rows,
            q.view(count * spec.kv_heads, spec.q_heads // spec.kv_heads, row.q_len, spec.head_dim),
            aligned(x["k"], x["k"].dtype if spec.quantized else torch.float32).flatten(0, 1),
            aligned(x["v"], x["v"].dtype if spec.quantized else torch.float32).flatten(0, 1),
            sinks[:, None, None],
            x["alibi_slopes"].reshape(-1, 1, 1) if "alibi_slopes" in x else None,
            None if mask is None else problem.mask_part(mask, rows),
            row.offset,
            x["k_scale"].flatten(0, 1) if spec.quantized else None,
            x["v_scale"].flatten(0, 1) if spec.quantized else None,
        )

    @property
    def each(self) -> tuple[int, int]:
        """The number of sequences, and the number of query heads of each."""
        return len(self.rows), self.problem.spec.q_heads

    @property
    def heads(self) -> int:
        """The number of query heads of all sequences."""
        return len(self.rows) * self.problem.spec.q_heads

    @property
    def scale(self) -> float:
        return self.problem.spec.scale

    @property
    def softcap(self) -> float:
        return self.problem.spec.options.softcap

    @property
    def q_len(self) -> int:
        return self.rows[0].q_len

    @property
    def kv_len(self) -> int:
        return self.rows[0].kv_len

    @property
    def dropout_p(self) -> float:
        return self.problem.spec.options.dropout_p

    def block(self, tile: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of queries (of each head) and keys of a tile; `tile` has these numbers for a single head.

        One product computes several query heads: those of one key/value head, or all if the problem cannot be cut by
        heads. Its number of queries is divided by the number of these heads.
        """
        spec, (queries, keys) = self.problem.spec, tile
        together = spec.q_heads // spec.kv_heads if can_be_cut(self.problem) else spec.q_heads
        return max(min(queries, _FEWEST_QUERIES), queries // together), keys

    def keys(self, j0: int, j1: int) -> Tensor:
        """Return keys j0 … j1, (n·Hk, bn, D) float32."""
        return _rows_of(self.k, self.k_scale, j0, j1)

    def values(self, j0: int, j1: int) -> Tensor:
        """Return values j0 … j1, (n·Hk, bn, Dv) float32."""
        return _rows_of(self.v, self.v_scale, j0, j1)

    def memory(self, queries: int, keys: int) -> Tensor:
        """Return memory for a tile of scores, which all tiles reuse: new memory would cost page faults every time."""
        return self.q.new_empty(self.heads * min(queries, self.q_len) * min(keys, self.kv_len))

    def grouped(self, t: Tensor) -> Tensor:
        """Return (n, Hq, sq, X) as float32 (n·Hk, G, sq, X)."""
        return aligned(t, torch.float32).view(*self.q.shape[:3], t.shape[-1])

    def queries(self, t: Tensor, i0: int, i1: int) -> Tensor:
        """Return queries i0 … i1 of a grouped tensor (n·Hk, G, sq, X) as the rows of a product, (n·Hk, G·bm, X)."""
        return t[:, :, i0:i1].reshape(t.shape[0], -1, t.shape[-1])

    def key_range(self, i0: int, i1: int) -> tuple[int, int]:
        """Return the range of keys that any of the queries i0 … i1 may see."""
        lo, hi = bounds.key_range(i0, i1 - 1, self.offset, *self.problem.spec.window, self.kv_len)
        return lo, hi

    def query_range(self, j0: int, j1: int) -> tuple[int, int]:
        """Return the range of queries that may see any of the keys j0 … j1."""
        lo, hi = bounds.query_range(j0, j1 - 1, self.offset, *self.problem.spec.window, self.q_len)
        return lo, hi

    def scores(
        self, q: Tensor, i0: int, i1: int, j0: int, j1: int, memory: Tensor, tangents: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores (n·Hq, bm, bn) of queries i0 … i1 and keys j0 … j1, in `memory`; hidden scores are −∞.

        `q` has the rows of the queries. Softcap is applied first, then ALiBi and the masks are added. With softcap,
        also return the tanh, in `tangents`: the backward needs it for softcap's derivative. The forward does not, and
        passes the same memory for `memory` and `tangents`.
        """
        left, right = self.problem.spec.window
        s = product(q, self.keys(j0, j1).mT, shaped(tangents, (*q.shape[:2], j1 - j0)))
        s = s.view(self.heads, i1 - i0, j1 - j0)
        tanh = None
        if self.softcap:
            tanh = tanh_(s)
            s = torch.mul(tanh, self.softcap, out=shaped(memory, s.shape))
        if self.slopes is not None:
            s.addcmul_(self.slopes, self.ahead(i0, i1, j0, j1).abs_().float(), value=-1.0)
        if self.mask is not None:
            parted(s, 0, self.each).add_(added(part_of(self.mask, i0, i1, j0, j1)))
        lo, hi = bounds.full_key_range(i0, i1 - 1, self.offset, left, right, self.kv_len)
        if j0 < lo or hi < j1:
            s.add_(self.edge(i0, i1, j0, j1))
        return s, tanh

    def ahead(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Return (bm, bn) int32: the position of each key minus that of its query."""
        queries, keys = (
            torch.arange(*ends, dtype=torch.int32, device=self.q.device)
            for ends in ((i0 + self.offset, i1 + self.offset), (j0, j1))
        )
        return keys - queries[:, None]

    def edge(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Return (bm, bn): −∞ outside the window (and causal mask), else 0.

        The result is cached by the tile's distance from the diagonal, which is equal for most tiles at the same edge.
        """
        place = j0 - i0, i1 - i0, j1 - j0
        if place not in self.edges:
            if len(self.edges) == _EDGES:
                self.edges.clear()
            self.edges[place] = outside(self.ahead(i0, i1, j0, j1), *self.problem.spec.window)
        return self.edges[place]

    def room(self, queries: int, keys: int) -> Tensor | None:
        """Return scratch memory for the random numbers from which `drop` makes its mask; None without dropout."""
        tile = (self.heads, min(queries, self.q_len), min(keys, self.kv_len))
        return room_for(*tile, self.q.device) if self.dropout_p else None

    def kept(self, i0: int, i1: int, j0: int, j1: int, room: Tensor | None = None) -> Tensor | None:
        """Return the bits of the probabilities (n·Hq, bm, bn) that dropout keeps; None without dropout."""
        if not self.dropout_p:
            return None
        assert self.problem.seed is not None, "a problem with dropout has a seed"
        tile = (self.problem.query_heads, range(i0, i1), range(j0, j1))
        sequences = [row.index for row in self.rows]
        return kept_bits(self.problem.seed, self.dropout_p, sequences, *tile, self.q.device, room)

    def drop(self, p: Tensor, i0: int, i1: int, j0: int, j1: int, room: Tensor, out: Tensor) -> Tensor:
        """Write to `out` the probabilities `p` (n·Hq, bm, bn), with 0 for the dropped ones."""
        bits = self.kept(i0, i1, j0, j1, room)
        assert bits is not None, "a tile with dropout"
        torch.bitwise_and(p.view(torch.int32), bits, out=out.view(torch.int32))
        return out


def steps(lo: int, hi: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(lo, hi, step):
        yield start, min(start + step, hi)


def _rows_of(t: Tensor, scale: Tensor | None, j0: int, j1: int) -> Tensor:
    rows = t[:, j0:j1]
    if scale is None:
        return rows
    return scaled(rows, scale if scale.shape[1] == 1 else scale[:, j0:j1])


def _finite(m: Tensor) -> Tensor:
    """Return maxima that can be subtracted: replace −∞, of a row that has seen no key, by float32's lowest number."""
    return m.clamp(min=torch.finfo(torch.float32).min)


def part_of(t: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """Return queries i0 … i1 and keys j0 … j1 of `t` (n|1, Hq|1, sq|1, sk|1). A dimension of size 1 keeps this size."""
    queries = slice(i0, i1) if t.shape[2] > 1 else slice(None)
    keys = slice(j0, j1) if t.shape[3] > 1 else slice(None)
    return t[:, :, queries, keys]
