"""Express key weights, the sums over the queries of each key's probability, as gradients that each backend computes.

With one column of values (Dv = 1) and dO = 1, the gradient dV = Pᵀ dO of attention is the sum of P over the queries. It
needs the forward's lse and O(N) memory. dV sums the query heads that share a key/value head. So the heads are computed
in turns: turn g has query head g of each group, and as many key/value heads. NaN of a head then stays in this head.

16-bit and 8-bit inputs are converted to float32, because dV has the dtype of q, in which large sums would be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems import sequences
from flashpoint_kernels.problems.problem import DTYPE_NAMES, Problem
from flashpoint_kernels.quantization import restored

_MASKS = ("attn_mask", "block_mask")
_OF_HEADS = ("alibi_slopes", "sinks")
_STARTS = ("cu_seqlens_q", "cu_seqlens_k")  # a ragged `Spec` has them; the rows have their numbers


def weighing(problem: Problem, backend: str) -> Iterator[Problem]:
    """Yield gradient problems whose dv is written into the problem's output `key_weights`.

    `problem` is a forward with lse among its tensors or outputs. The problems may run in any order; they have one
    launch key.
    """
    spec, rows = problem.spec, problem.rows
    lse = problem.tensors["lse"] if "lse" in problem.tensors else problem.outputs["lse"]
    if not rows:
        return
    whole = Views.of(problem, backend, lse, problem.view("k"), problem.view("key_weights"))
    parts = [whole.alone(row) for row in rows] if spec.paged or spec.quantized else [whole.of_rows()]
    for part in parts:
        yield from part.turns()


@dataclass(frozen=True, eq=False)
class Views:
    """Sequences of a problem as canonical views, before its heads are computed in turns.

    `problem` has the options and the index tensors.
    """

    problem: Problem
    backend: str
    ragged: bool
    rows: Sequence[Row]
    q: Tensor  # (N,Hq,Sq,D)
    k: Tensor  # (N,Hk,Sk,D)
    lse: Tensor  # (N,Hq,Sq)
    weights: Tensor  # (N,Hq,Sk)
    mask: Tensor | None  # (B|1,Hq|1,Sq|1,Sk|1)
    blocks: Tensor | None
    slopes: Tensor | None  # (Hq,) or (B,Hq)
    sinks: Tensor | None  # (Hq,): `reference` computes lse again

    @classmethod
    def of(cls, problem: Problem, backend: str, lse: Tensor, k: Tensor, weights: Tensor) -> Views:
        """Return all sequences of a forward, with lse as the caller's options shape it. `k` and `weights` are views."""
        given = problem.tensors
        mask, blocks = (problem.whole_mask(given[name]) if name in given else None for name in _MASKS)
        slopes, sinks = (problem.view(name) if name in given else None for name in _OF_HEADS)
        q, lse = problem.view("q"), problem.canonical("lse", lse)
        return cls(problem, backend, problem.spec.ragged, problem.rows, q, k, lse, weights, mask, blocks, slopes, sinks)

    def of_rows(self) -> Views:
        """Return views of the sequences `rows` alone, of which the problem may have more."""
        first, last, shift = self.rows[0], self.rows[-1], -self.rows[0].index

        def of(t: Tensor | None, start: int, stop: int) -> Any:
            return t if t is None or len(t) == 1 else t[start:stop]

        index = first.index, last.index + 1
        slopes = of(self.slopes, *index) if self.slopes is not None and self.slopes.ndim == 2 else self.slopes
        if self.ragged:
            q, lse = (t[:, :, first.q_start : last.q_start + last.q_rows] for t in (self.q, self.lse))
            k, weights = (t[:, :, first.kv_start : last.kv_start + last.kv_rows] for t in (self.k, self.weights))
            rows = [
                row._replace(
                    index=row.index + shift, q_start=row.q_start - first.q_start, kv_start=row.kv_start - first.kv_start
                )
                for row in self.rows
            ]
            return replace(self, rows=rows, q=q, k=k, lse=lse, weights=weights, slopes=slopes)
        q, k, lse, weights, mask, blocks = (
            of(t, *index) for t in (self.q, self.k, self.lse, self.weights, self.mask, self.blocks)
        )
        rows = [row._replace(index=row.index + shift, batch=row.batch + shift) for row in self.rows]
        return replace(self, rows=rows, q=q, k=k, lse=lse, weights=weights, mask=mask, blocks=blocks, slopes=slopes)

    def alone(self, row: Row) -> Views:
        """Return one sequence whose keys are in pages or have 8 bits, with its keys gathered in float32."""
        paged = self.problem.spec.paged
        place = row.index if paged else row.batch
        weights = self.weights[place, :, row.kv_start : row.kv_start + row.kv_rows][None]
        if paged:
            self.weights[place, :, row.kv_len :] = 0
        return self.of_keys(row, place, 0, _keys(self.problem, self.k, row), weights)

    def of_keys(self, row: Row, place: int, first: int, k: Tensor, weights: Tensor) -> Views:
        """Return one sequence with its keys `k` (1,Hk,n,D) from number `first` on, and their `weights` (1,Hq,n).

        `place` is its index in the masks. `first` is a multiple of the keys of a block of the block mask.
        """
        stop = first + k.shape[2]
        q, lse = (t[row.batch, :, row.q_start : row.q_start + row.q_len][None] for t in (self.q, self.lse))
        mask, blocks = (None if t is None else t[place if len(t) > 1 else 0][None] for t in (self.mask, self.blocks))
        if mask is not None:
            mask = mask[:, :, : row.q_len] if mask.shape[2] > 1 else mask
            mask = mask[..., first:stop] if mask.shape[3] > 1 else mask
        if blocks is not None:
            queries, keys = self.problem.spec.options.block_size
            blocks = blocks[:, :, : -(-row.q_len // queries), first // keys : -(-stop // keys)]
        slopes = None if self.slopes is None else self.slopes[row.index] if self.slopes.ndim == 2 else self.slopes
        one = row._replace(
            index=0, batch=0, q_start=0, q_rows=row.q_len, kv_start=0, kv_len=min(row.kv_len, stop) - first,
            kv_rows=k.shape[2], offset=row.offset - first,
        )  # fmt: skip
        return replace(
            self, ragged=False, rows=(one,), q=q, k=k, lse=lse, weights=weights, mask=mask, blocks=blocks, slopes=slopes
        )

    def of_heads(self, start: int, stop: int) -> Views:
        """Return the key/value heads [`start`, `stop`) and their query heads."""
        group = self.q.shape[1] // self.k.shape[1]
        mine = slice(start * group, stop * group)
        q, lse, weights = (t[:, mine] for t in (self.q, self.lse, self.weights))
        mask, blocks = (t if t is None or t.shape[1] == 1 else t[:, mine] for t in (self.mask, self.blocks))
        slopes, sinks = (None if t is None else t[..., mine] for t in (self.slopes, self.sinks))
        k = self.k[:, start:stop]
        return replace(self, q=q, k=k, lse=lse, weights=weights, mask=mask, blocks=blocks, slopes=slopes, sinks=sinks)

    def turns(self) -> Iterator[Problem]:
        """Yield a problem for each query head of a group."""
        spec = self.problem.spec
        dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        q, k = _wide(self.q, dtype), _wide(self.k, dtype)
        heads = k.shape[1]
        group = q.shape[1] // heads
        zero, one = (torch.full((1, 1, 1, 1), n, dtype=dtype, device=q.device) for n in (0.0, 1.0))
        values, shape = zero.expand(k.shape[0], heads, k.shape[2], 1), (q.shape[0], heads, q.shape[2], 1)
        precision = "tf32" if self.backend == "triton" and spec.dtype in ("float16", "bfloat16") else None
        options = _options(spec.options, self.ragged, precision)
        for turn in range(group):
            mine = slice(turn, None, group)
            outputs = {"dv": self.weights[:, mine, :, None]}
            tensors = {
                "q": q[:, mine], "k": k, "v": values, "do": one.expand(shape), "o": zero.expand(shape),
                "lse": self.lse[:, mine],
            }  # fmt: skip
            if self.ragged:
                thd = {name: t[0].transpose(0, 1) for name, t in tensors.items() if name != "lse"}
                tensors = thd | {"lse": tensors["lse"][0]}
                outputs = {"dv": outputs["dv"][0].transpose(0, 1)}
            for name, t in (("attn_mask", self.mask), ("block_mask", self.blocks)):
                if t is not None:
                    tensors[name] = t[:, mine] if t.shape[1] > 1 else t
            if self.slopes is not None:
                tensors["alibi_slopes"] = self.slopes[..., mine]
            if self.sinks is not None:
                tensors["sinks"] = self.sinks[mine]
            if self.ragged:
                tensors |= {name: self.problem.tensors[name] for name in _STARTS}
            yield self._problem(options, tensors, outputs)

    def _problem(self, options: Options, tensors: dict[str, Tensor], outputs: dict[str, Tensor]) -> Problem:
        infos = {name: TensorInfo(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        heads = self.k.shape[1]
        spec = Spec(
            "backward", options, infos, 3 if self.ragged else 4, len(self.rows) if self.ragged else len(self.q),
            heads, heads, self.q.shape[2], self.k.shape[2], self.q.shape[3], 1, infos["q"].dtype,
        )  # fmt: skip
        return replace(
            self.problem, spec=spec, rows=tuple(self.rows), seed=None, tensors=tensors, outputs=outputs, cut_of=0,
            first_head=0, pages=None,
        )  # fmt: skip


@lru_cache(256)  # a model repeats few combinations of options
def _options(options: Options, ragged: bool, precision: str | None) -> Options:
    return replace(
        options, layout="thd" if ragged else "bhsd", dropout_p=0.0, dropout_seed=None, return_lse=False,
        return_key_weights=False, grads=("dv",), deterministic=True, precision=precision or options.precision,
    )  # fmt: skip


def _wide(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def _keys(problem: Problem, k: Tensor, row: Row) -> Tensor:
    """Return the keys of a sequence in float32, or in q's dtype if it is float64: (1,Hk,kv_rows,D)."""
    spec = problem.spec
    scale = problem.view("k_scale") if spec.quantized else None
    if spec.paged:
        table = problem.tensors["block_table"]
        plain = k.view(torch.uint8) if k.itemsize == 1 else k  # not every device can index float8 tensors
        keys = sequences.gathered_pages(spec, plain, table, [row]).view(k.dtype)
        if scale is not None and spec.per_row("k_scale"):
            scale = sequences.gathered_pages(spec, scale, table, [row])
    else:
        keys = k[row.batch, :, row.kv_start : row.kv_start + row.kv_rows][None]
        if scale is not None and spec.per_row("k_scale"):
            scale = scale[row.batch, :, row.kv_start : row.kv_start + row.kv_rows][None]
    if scale is None:
        return keys
    if not spec.per_row("k_scale"):
        scale = scale[row.index if len(scale) > 1 else 0][None]
    return restored(keys, scale.float())
