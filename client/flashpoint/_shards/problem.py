"""A whole problem as every shard sees it: views (B,H,S,D) whatever the layout, and the sequences that are in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint._arrays import INDEX, Array, to_like, to_numpy
from flashpoint._shards.cut import UNBOUNDED, Band
from flashpoint.errors import invalid
from flashpoint.options import AttentionOptions

Numbers = NDArray[Any]
MAX_HEAD_DIM = 256  # of every backend but the reference, as the contract has it
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Rows(NamedTuple):
    """Sequences of one geometry: where they are in the batch and among the sequences, and where their rows begin."""

    batch: slice
    sequences: slice
    q_start: int
    kv_start: int
    band: Band


@dataclass(frozen=True)
class Problem:
    """q (B,Hq,Sq,D), k and v (B,Hk,Sk,·), and what else is given, as such views; `thd` is one long sequence of rows.

    `attn_mask` has four dimensions, each 1 or in full; `alibi_slopes` is (B or 1,Hq); `lse` is (B,Hq,Sq).
    """

    options: AttentionOptions
    tensors: dict[str, Numbers]
    rows: tuple[Rows, ...]
    shapes: dict[str, tuple[int, ...]]  # as they were given
    like: Array

    @property
    def ragged(self) -> bool:
        return self.options.layout == "thd"

    @property
    def on_reference(self) -> bool:
        """Whether only the reference backend does it: its gradients take no lse, and lse would round its float64."""
        wide = max(self.tensors[name].shape[-1] for name in ("q", "v")) > MAX_HEAD_DIM
        return wide or self.options.backend == "reference" or self.tensors["q"].dtype == np.float64

    @property
    def sum_dtype(self) -> type[np.floating[Any]]:
        """What parts of an answer are added up in."""
        return np.float64 if self.tensors["q"].dtype == np.float64 else np.float32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the answer, as the caller wants it."""
        b, h, s, _ = self.tensors["q"].shape
        return {4: (b, h, s), 3: (h, s) if self.ragged else (b, s), 2: (s,)}[len(self.shapes["q"])]

    def view(self, array: Numbers) -> Numbers:
        """A tensor in the caller's layout as (B,H,S,D)."""
        return _view(array, self.options.layout)

    def answer(self, name: str, array: Numbers) -> Any:
        """A part of the answer as the caller has its tensors."""
        source = {"o": "q"}.get(name, name[1:])
        dtype = np.dtype(np.float32) if name == "lse" else self.tensors[source].dtype
        with np.errstate(over="ignore"):  # inf, as a server's
            return to_like(array.astype(dtype, copy=False), self.like)


def problem(tensors: Mapping[str, Any], options: AttentionOptions) -> Problem:
    """The problem of these tensors, of which some are None. Raises InvalidInputError naming what does not fit."""
    if options.dropout_p:
        raise invalid("dropout_p", "counts positions in the whole sequence, which a shard does not know: not sharded")
    given = {name: to_numpy(name, t) for name, t in tensors.items() if t is not None or name in ("q", "k", "v")}
    shapes = {name: t.shape for name, t in given.items()}
    sizes = _sizes(shapes, options.layout)
    _check(given, sizes, options)
    index = {name: given.pop(name).tolist() for name in INDEX if name in given}
    layout, rank = options.layout, len(shapes["q"])
    views = {name: _view(t, layout) for name, t in given.items() if name in ("q", "k", "v", "o", "do")}
    for name in {"lse", "dlse"} & given.keys():
        views[name] = given[name].reshape(sizes.batch, sizes.q_heads, sizes.q_len)
    if "attn_mask" in given:
        mask = given["attn_mask"]
        mask = mask.reshape((1,) * (rank - mask.ndim) + mask.shape)
        views["attn_mask"] = mask[:, None] if rank == 3 else mask.reshape((1,) * (4 - rank) + mask.shape)
    if "alibi_slopes" in given:
        views["alibi_slopes"] = given["alibi_slopes"].reshape(-1, sizes.q_heads)
    if "sinks" in given:
        views["sinks"] = given["sinks"]
    rows = tuple(_rows(sizes, index, options))
    return Problem(options, views, rows, shapes, tensors["q"])


class _Sizes(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int


def _view(array: Numbers, layout: str) -> Numbers:
    if layout == "thd":
        return array.swapaxes(0, 1)[None]
    if array.ndim == 4:
        return array if layout == "bhsd" else array.swapaxes(1, 2)
    return array[:, None] if array.ndim == 3 else array[None, None]


def _sizes(shapes: Mapping[str, tuple[int, ...]], layout: str) -> _Sizes:
    rank = len(shapes["q"])
    if rank not in ((3,) if layout == "thd" else (2, 3, 4)):
        raise invalid("q", f"has {rank} dimensions, which layout {layout} does not take")
    for name in ("k", "v"):
        if len(shapes[name]) != rank:
            raise invalid(name, f"has {len(shapes[name])} dimensions where q has {rank}")
    q, k, v = (_view(np.broadcast_to(np.False_, shapes[name]), layout).shape for name in ("q", "k", "v"))
    sizes = _Sizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])
    if k[0] != sizes.batch or k[3] != sizes.head_dim:
        raise invalid("k", f"shape {list(shapes['k'])} does not fit q's {list(shapes['q'])}")
    if v[:3] != k[:3]:
        raise invalid("v", f"shape {list(shapes['v'])} does not fit k's {list(shapes['k'])}")
    if not sizes.kv_heads or not sizes.q_heads or sizes.q_heads % sizes.kv_heads:
        raise invalid("q", f"its {sizes.q_heads} heads must be a positive multiple of k's {sizes.kv_heads}")
    if not sizes.head_dim or not sizes.value_dim:
        raise invalid("v" if sizes.head_dim else "q", "the head dimension must be at least 1")
    return sizes


def _check(given: Mapping[str, Numbers], sizes: _Sizes, options: AttentionOptions) -> None:
    """What slicing would not notice. The servers check the rest in what they are sent."""
    ragged, q, v = options.layout == "thd", given["q"].shape, sizes.value_dim
    lse = (sizes.q_heads, sizes.q_len) if ragged else {4: (*sizes[:2], sizes.q_len), 3: q[:2], 2: q[:1]}[len(q)]
    sequences: tuple[tuple[int, ...], ...] = ((sizes.batch,),)
    if ragged:
        found = [given[name].shape for name in ("cu_seqlens_q", "cu_seqlens_k") if name in given]
        if len(found) < 2 or len(found[0]) != 1 or found[0] != found[1] or not found[0][0]:
            raise invalid("cu_seqlens_q", "layout thd takes cu_seqlens_q and cu_seqlens_k, both of one shape (n+1,)")
        sequences = ((found[0][0] - 1,),)
    refused = ("attn_mask", "q_lengths", "kv_lengths") if ragged else ("cu_seqlens_q", "cu_seqlens_k")
    for name in refused:
        if name in given:
            raise invalid(name, f"is not taken in layout {options.layout}")
    wanted: dict[str, tuple[tuple[int, ...], ...]] = {
        "do": ((*q[:-1], v),), "o": ((*q[:-1], v),), "lse": (lse,), "dlse": (lse,), "sinks": ((sizes.q_heads,),),
        "alibi_slopes": ((sizes.q_heads,), (*sequences[0], sizes.q_heads)),
        "q_lengths": sequences, "kv_lengths": sequences,
    }  # fmt: skip
    for name, shapes in wanted.items():
        if name in given and given[name].shape not in shapes:
            raise invalid(name, f"shape {list(given[name].shape)} must be {' or '.join(str(list(s)) for s in shapes)}")
    if given["q"].dtype.name not in _FLOATS:
        raise invalid("q", f"dtype {given['q'].dtype} is none of {', '.join(_FLOATS)}")
    for name in ("k", "v", "do", "o"):
        if name in given and given[name].dtype != given["q"].dtype:
            raise invalid(name, f"dtype {given[name].dtype} is not q's {given['q'].dtype}")
    for name in INDEX:
        if name in given and given[name].dtype.name not in ("int32", "int64"):
            raise invalid(name, f"dtype {given[name].dtype} must be int32 or int64")
    if ("o" in given) != ("lse" in given):
        raise invalid("lse" if "o" in given else "o", "o and lse come together")
    _check_mask(given, sizes, options)


def _check_mask(given: Mapping[str, Numbers], sizes: _Sizes, options: AttentionOptions) -> None:
    if "attn_mask" in given:
        mask, rank = given["attn_mask"].shape, given["q"].ndim
        full = {4: sizes[:2], 3: sizes[:1], 2: ()}[rank] + (sizes.q_len, sizes.kv_len)
        padded = (1,) * (rank - len(mask)) + mask
        if len(padded) > rank or any(size not in (1, whole) for size, whole in zip(padded, full, strict=True)):
            raise invalid("attn_mask", f"shape {list(mask)} does not broadcast to {list(full)}")
    if "dattn_mask" in options.grads and ("attn_mask" not in given or given["attn_mask"].dtype == np.bool_):
        raise invalid("grads", "dattn_mask needs a float attn_mask")
    if "dsinks" in options.grads and "sinks" not in given:
        raise invalid("grads", "dsinks needs sinks")


def _rows(sizes: _Sizes, index: Mapping[str, list[int]], options: AttentionOptions) -> Iterator[Rows]:
    """The sequences of a problem: all together where they are of one geometry, else one by one."""

    def band(q_len: int, kv_len: int) -> Band:
        left, right = (UNBOUNDED if side < 0 else side for side in options.window)
        offset = kv_len - q_len if options.causal_alignment == "bottom_right" else 0
        return Band(q_len, kv_len, offset, left, min(right, 0) if options.causal else right)

    if options.layout == "thd":
        for name, total in (("cu_seqlens_q", sizes.q_len), ("cu_seqlens_k", sizes.kv_len)):
            cu = index[name]
            if cu[0] != 0 or cu[-1] != total or any(a > b for a, b in pairwise(cu)):
                raise invalid(name, f"must start at 0, never fall, and end at {total}")
        bounds = zip(pairwise(index["cu_seqlens_q"]), pairwise(index["cu_seqlens_k"]), strict=True)
        for i, ((a, b), (c, d)) in enumerate(bounds):
            yield Rows(slice(0, 1), slice(i, i + 1), a, c, band(b - a, d - c))
    elif index:
        q_lengths = index.get("q_lengths", [sizes.q_len] * sizes.batch)
        kv_lengths = index.get("kv_lengths", [sizes.kv_len] * sizes.batch)
        for name, lengths, whole in (("q_lengths", q_lengths, sizes.q_len), ("kv_lengths", kv_lengths, sizes.kv_len)):
            if any(not 0 <= length <= whole for length in lengths):
                raise invalid(name, f"must lie between 0 and {whole}")
        for b, (q_len, kv_len) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
            yield Rows(slice(b, b + 1), slice(b, b + 1), 0, 0, band(q_len, kv_len))
    else:
        yield Rows(slice(0, sizes.batch), slice(0, sizes.batch), 0, 0, band(sizes.q_len, sizes.kv_len))
