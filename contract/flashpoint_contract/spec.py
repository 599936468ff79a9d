"""A checked problem: options, shapes and dtypes validated and priced before any tensor is touched.

A process that reads only the head of a message validates and prices the whole problem here. Notation: see `tensors`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from flashpoint_contract.options import (
    LEAST_NORMAL_FLOAT32,
    OPTIONS,
    UNBOUNDED,
    Direction,
    Options,
    ProblemError,
)
from flashpoint_contract.tensors import (
    BACKWARD_TENSORS,
    FEATURES,
    FORWARD_TENSORS,
    ITEMSIZE,
    MAX_HEAD_DIM,
    TENSORS,
    Tensor,
    TensorInfo,
)


class Row(NamedTuple):
    """One sequence of a request: where its rows lie in the canonical (N, H, S, D) views, and how many are valid.

    `batch` indexes N (0 in `thd`), `index` is the sequence's number within its request (what dropout counts by).
    Query row i of the sequence is canonical row `q_start + i`; rows `q_len` to `q_rows` are padding, likewise for keys.
    """

    index: int  # type: ignore[assignment]  # a name the field has; tuple's own `index` is never wanted
    batch: int
    q_start: int
    q_len: int
    q_rows: int
    kv_start: int
    kv_len: int
    kv_rows: int


@dataclass(frozen=True)
class Spec:
    """One valid problem: its options, sizes and what it asks of a backend. Made by `plan`."""

    direction: Direction
    options: Options
    tensors: Mapping[str, TensorInfo]
    rank: int
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str

    @property
    def ragged(self) -> bool:
        return self.options.layout == "thd"

    @property
    def scale(self) -> float:
        scale = self.options.scale
        return 1.0 / math.sqrt(self.head_dim) if scale is None else float(scale)

    @cached_property
    def window(self) -> tuple[int, int]:
        """(left, right) bounds of j − (i + offset), causality included: a causal problem is one whose right is <= 0."""
        left, right = (UNBOUNDED if w < 0 else w for w in self.options.window)
        return left, min(right, 0) if self.options.causal else right

    def offset(self, q_len: int, kv_len: int) -> int:
        """The diagonal's offset: query i stands at key i + offset."""
        return kv_len - q_len if self.options.causal_alignment == "bottom_right" else 0

    def has(self, name: str) -> bool:
        return name in self.tensors

    @cached_property
    def features(self) -> frozenset[str]:
        """What the problem asks of a backend: names of `tensors.FEATURES`."""
        used = {self.dtype}
        for name, option in OPTIONS.items():
            if option.feature is not None and option.asks(getattr(self.options, name)):
                used.add(option.feature.name)
        for name, info in self.tensors.items():
            if (feature := TENSORS[name].feature(info.dtype)) is not None:
                used.add(feature.name)
        if self.q_heads != self.kv_heads:
            used.add("gqa")
        if self.head_dim != self.value_dim:
            used.add("value_dim")
        if max(self.head_dim, self.value_dim) > MAX_HEAD_DIM:
            used.add("large_head_dim")
        if self.direction == "backward":
            used.update({"backward", *(name for name in self.options.grads if name in FEATURES)})
        return frozenset(used)

    @cached_property
    def level(self) -> int:
        """Which of three variants of a kernel the problem needs: the highest level of its features.

        0: causal or not, any lengths and heads, a positive scale (which the largest score then survives); 1: also
        window, any scale, and what touches a score or a row by a number; 2: every option. Three, so that few variants
        are compiled, and options that are cheap to switch at run time cost no variant of their own.
        """
        least = 1 if self.scale < LEAST_NORMAL_FLOAT32 else 0
        return max(least, *(FEATURES[name][1].level for name in self.features))

    @cached_property
    def outputs(self) -> dict[str, TensorInfo]:
        """Name, dtype and shape of every answer tensor, in the layout and rank of the inputs."""
        if self.direction == "backward":
            return {name: info for name in self.options.grads if (info := self.tensors.get(name[1:])) is not None}
        o = TensorInfo(self.dtype, self.shape_of("o"))
        return {"o": o, "lse": TensorInfo("float32", self.lse_shape)} if self.options.return_lse else {"o": o}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by its name in `tensors`."""
        names = ("B", "B+1", "Hq", "Hk", "Sq", "Sk", "D", "Dv")
        heads, lengths = (self.q_heads, self.kv_heads), (self.q_len, self.kv_len)
        sizes = (self.batch, self.batch + 1, *heads, *lengths, self.head_dim, self.value_dim)
        return dict(zip(names, sizes, strict=True))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the largest shape that a tensor of that name may have in this problem."""
        return TENSORS[name].shape(self.sizes, self.options.layout, self.rank)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        return self.shape_of("lse")

    @cached_property
    def forward(self) -> Spec:
        """Of a gradient problem, the forward that gives its `o` and `lse`."""
        infos = {name: info for name, info in self.tensors.items() if name in FORWARD_TENSORS}
        return plan(infos, replace(self.options, return_lse=True), "forward")

    @property
    def has_forward(self) -> bool:
        """Whether a gradient request brought `o` and `lse`, so that the forward need not run again."""
        return "lse" in self.tensors

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, an upper bound where lengths are not known yet.

        Forward 2·Hq·Sq·Sk·(D + Dv) per sequence (FlashAttention-2, §4.1); our two-pass backward recomputes S and dP
        once more: 7 products instead of 2, so 3.5 times that; causal squares do half.
        """
        pairs = self.q_len * self.kv_len * (1 if self.ragged else self.batch)
        forward = 2 * self.q_heads * pairs * (self.head_dim + self.value_dim)
        if self.options.causal and self.q_len == self.kv_len:
            forward //= 2
        if self.direction == "forward":
            return forward
        return forward * 7 // 2 + (0 if self.has_forward else forward)

    @cached_property
    def input_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def output_bytes(self) -> int:
        return sum(info.nbytes for info in self.outputs.values())

    @cached_property
    def footprint(self) -> int:
        """The least bytes that it needs: its inputs and answers, for no backend holds more than some tiles beside.

        A dimension of 0 counts as 1, so that an empty tensor cannot hide what the others would cost.
        """
        tensors = [*self.tensors.values(), *self.outputs.values()]
        return sum(math.prod(max(n, 1) for n in t.shape) * ITEMSIZE[t.dtype] for t in tensors)

    def rows(self, index: Mapping[str, Sequence[int]]) -> tuple[Row, ...]:
        """The table of sequences, from the values of the index tensors (`q_lengths`, `kv_lengths`, `cu_seqlens_*`).

        Raises ProblemError when the values do not fit the shapes.
        """
        errors = []
        if self.ragged:
            for name, total in (("cu_seqlens_q", self.q_len), ("cu_seqlens_k", self.kv_len)):
                cu = index[name]
                if cu[0] != 0 or cu[-1] != total or any(a > b for a, b in itertools.pairwise(cu)):
                    errors.append((name, f"must start at 0, never fall, and end at {total}"))
            if errors:
                raise ProblemError(errors)
            cu_q, cu_k = index["cu_seqlens_q"], index["cu_seqlens_k"]
            nq, nk = ([b - a for a, b in itertools.pairwise(cu)] for cu in (cu_q, cu_k))
            return _rows(self.batch, itertools.repeat(0), cu_q, nq, nq, cu_k, nk, nk)
        for name, longest in (("q_lengths", self.q_len), ("kv_lengths", self.kv_len)):
            if name in index and any(not 0 <= n <= longest for n in index[name]):
                errors.append((name, f"must lie between 0 and {longest}"))
        if errors:
            raise ProblemError(errors)
        q_lengths = index.get("q_lengths") or [self.q_len] * self.batch
        kv_lengths = index.get("kv_lengths") or [self.kv_len] * self.batch
        zero, q_rows, kv_rows = (itertools.repeat(n) for n in (0, self.q_len, self.kv_len))
        return _rows(self.batch, itertools.count(), zero, q_lengths, q_rows, zero, kv_lengths, kv_rows)


def _rows(count: int, *columns: Iterable[int]) -> tuple[Row, ...]:
    """Make rows from their columns after `index`: quickly, for there may be 65,536."""
    return tuple(map(Row._make, zip(range(count), *columns, strict=False)))


def plan(tensors: Mapping[str, TensorInfo], options: Options, direction: Direction) -> Spec:
    """Check names, dtypes and shapes against the contract and say what is asked. Raises ProblemError.

    What needs the values of tensors (lengths, cu_seqlens) is checked by `Spec.rows` when they are in.
    """
    return _plan(tuple(tensors.items()), options, direction)


@lru_cache(1024)  # a model asks for the same few problems again and again
def _plan(named: tuple[tuple[str, TensorInfo], ...], options: Options, direction: Direction) -> Spec:
    tensors = dict(named)
    known = FORWARD_TENSORS if direction == "forward" else BACKWARD_TENSORS
    if unknown := [name for name in tensors if name not in known]:
        raise ProblemError((name, f"unknown tensor; known are {', '.join(known)}") for name in unknown)
    if missing := [name for name in needed(options.layout, direction) if name not in tensors]:
        raise ProblemError((name, "missing") for name in missing)
    _check_dtypes(tensors)
    spec = _sizes(tensors, options, direction)
    errors = [*_check_shapes(spec), *_check_options(spec)]
    if errors:
        raise ProblemError(errors)
    return spec


def needed(layout: str, direction: Direction) -> list[str]:
    """Return the tensors that a call cannot do without."""
    known = FORWARD_TENSORS if direction == "forward" else BACKWARD_TENSORS
    return [name for name in known if TENSORS[name].required or TENSORS[name].layouts == (layout,)]


def _check_dtypes(tensors: Mapping[str, TensorInfo]) -> None:
    errors = []
    dtype = tensors["q"].dtype
    for name, info in tensors.items():
        row = TENSORS[name]
        if row.like_q and name != "q":
            if info.dtype != dtype:
                errors.append((name, f"dtype {info.dtype} is not q's {dtype}"))
        elif info.dtype not in row.dtypes:
            errors.append((name, f"dtype {info.dtype} must be {_or(row)}"))
        if any(n < 0 for n in info.shape):
            errors.append((name, f"shape {list(info.shape)} has a negative dimension"))
    if errors:
        raise ProblemError(errors)


def _or(row: Tensor) -> str:
    """Name the dtypes of a row as an error does."""
    *others, last = row.dtypes
    return f"{', '.join(others)} or {last}"


def _sizes(tensors: Mapping[str, TensorInfo], options: Options, direction: Direction) -> Spec:
    ragged = options.layout == "thd"
    rank = len(tensors["q"].shape)
    if ragged and rank != 3:
        raise ProblemError([("q", f"layout thd takes (T,H,D), not {rank} dimensions")])
    if rank not in (2, 3, 4):
        raise ProblemError([("q", f"takes 2, 3 or 4 dimensions, not {rank}")])
    if bad := [name for name in ("k", "v") if len(tensors[name].shape) != rank]:
        raise ProblemError((name, f"has {len(tensors[name].shape)} dimensions where q has {rank}") for name in bad)

    def split(name: str) -> tuple[int, int, int, int]:
        """(batch, heads, length, dim) of q, k or v."""
        shape = tensors[name].shape
        if ragged:
            return 0, shape[1], shape[0], shape[2]
        if rank == 4:
            b, x, y, d = shape
            return (b, x, y, d) if options.layout == "bhsd" else (b, y, x, d)
        return (shape[0] if rank == 3 else 1), 1, shape[-2], shape[-1]

    (batch, q_heads, q_len, head_dim), (kb, kv_heads, kv_len, kd) = split("q"), split("k")
    vb, v_heads, v_len, value_dim = split("v")
    errors = []
    if kb != batch or vb != batch:
        errors.append(("k" if kb != batch else "v", f"batch {kb if kb != batch else vb} is not q's {batch}"))
    if kd != head_dim:
        errors.append(("k", f"head dimension {kd} is not q's {head_dim}"))
    if v_heads != kv_heads or v_len != kv_len:
        errors.append(("v", f"heads and length {(v_heads, v_len)} are not k's {(kv_heads, kv_len)}"))
    if q_heads == 0 or kv_heads == 0 or q_heads % kv_heads:
        errors.append(("q", f"its {q_heads} heads must be a positive multiple of k's {kv_heads}"))
    if head_dim < 1 or value_dim < 1:
        errors.append(("q" if head_dim < 1 else "v", "the head dimension must be at least 1"))
    if ragged:
        shapes = [tensors[n].shape for n in ("cu_seqlens_q", "cu_seqlens_k")]
        if len(shapes[0]) != 1 or shapes[0][0] < 1 or shapes[0] != shapes[1]:
            errors.append(("cu_seqlens_k", f"both cu_seqlens must have one shape (n+1,), not {shapes}"))
        else:
            batch = shapes[0][0] - 1
    if errors:
        raise ProblemError(errors)
    return Spec(
        direction, options, dict(tensors), rank, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim,
        tensors["q"].dtype,
    )  # fmt: skip


def _check_shapes(spec: Spec) -> Iterable[tuple[str, str]]:
    layout = spec.options.layout
    for name, info in spec.tensors.items():
        row = TENSORS[name]
        if row.has_columns and row.direction == "forward":  # q, k and v, which the sizes come from
            continue
        full = spec.shape_of(name)
        if layout not in row.layouts:
            yield name, f"is not taken in layout {layout}, but in {' and '.join(row.layouts)}"
        elif row.broadcast:
            padded = (1,) * (len(full) - len(info.shape)) + info.shape
            if len(padded) > len(full) or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
                yield name, f"shape {list(info.shape)} does not broadcast to {list(full)}"
        elif info.shape not in (allowed := [full[1:], full] if row.shared else [full]):
            yield name, f"shape {list(info.shape)} must be {' or '.join(str(list(shape)) for shape in allowed)}"


def _check_options(spec: Spec) -> Iterable[tuple[str, str]]:
    o, t = spec.options, spec.tensors
    if ("o" in t) != ("lse" in t):
        missing = "lse" if "o" in t else "o"
        yield missing, "o and lse come together: with both, the forward is not run again"
    if spec.direction == "backward":
        if o.dropout_p and o.dropout_seed is None:
            yield "dropout_seed", "a gradient with dropout needs the forward's seed"
        for name in o.grads:
            row = TENSORS[name[1:]]
            if row.name not in t or t[row.name].dtype == "bool":
                kind = "a float " if "bool" in row.dtypes else ""
                yield "grads", f"{name} needs {kind}{row.name}"
