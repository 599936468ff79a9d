"""Check an attention problem (options, shapes and dtypes), and predict its cost, without the data of its tensors.

So a server can do this when it has read only the header of a request. The module `tensors` defines the letters B, Hq,
….
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from flashpoint_contract.options import (
    FARTHEST_OFFSET,
    LEAST_NORMAL_FLOAT32,
    OPTIONS,
    UNBOUNDED,
    Direction,
    Options,
    ProblemError,
)
from flashpoint_contract.tensors import (
    FEATURES,
    FORWARD_TENSORS,
    ITEMSIZE,
    MAX_FUSED_HEAD_DIM,
    MAX_HEAD_DIM,
    TAKEN,
    TENSORS,
    Tensor,
    TensorInfo,
    check_dtypes,
    needed,
    why_not,
)
from flashpoint_contract.wording.hints import each_meant


class Row(NamedTuple):
    """One sequence of a request: where its rows are in the canonical (N, H, S, D) views, and its valid lengths.

    Query row i of the sequence is canonical row `q_start + i`. Rows from `q_len` to `q_rows` are padding; likewise for
    keys. If k and v are pages, `kv_start` is 0 and there is no padding (`kv_rows` is `kv_len`): key j of the sequence
    is key j mod page_size of page `block_table[index, j div page_size]`.
    """

    index: int  # type: ignore[assignment]  # number of the sequence in its request, for dropout
    batch: int  # index in dimension N; 0 in `thd`
    q_start: int
    q_len: int
    q_rows: int
    kv_start: int
    kv_len: int
    kv_rows: int
    offset: int  # query i is at key i + offset, for `causal`, `window` and ALiBi


@dataclass(frozen=True)
class Spec:
    """One valid problem: its options and sizes, and the features that it needs. `plan` makes it.

    If k and v are pages: `pool` pages of `page_size` keys; `kv_len` is the maximum number of keys of a sequence.
    """

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
    pool: int = 0
    page_size: int = 0

    @cached_property
    def ragged(self) -> bool:
        return self.options.layout == "thd"

    @cached_property
    def paged(self) -> bool:
        """Whether k and v are pages, to which `block_table` refers."""
        return "block_table" in self.tensors

    @cached_property
    def quantized(self) -> bool:
        """Whether k and v are 8-bit numbers with the factors `k_scale` and `v_scale`."""
        return "k_scale" in self.tensors

    def per_row(self, scale: str) -> bool:
        """Return whether `scale` (`k_scale` or `v_scale`) has a number for each token and head.

        Otherwise it has one for each head, or a single one.
        """
        return self.tensors[scale].shape == self.shape_of(scale)

    @cached_property
    def scale(self) -> float:
        scale = self.options.scale
        return 1.0 / math.sqrt(max(1, self.head_dim)) if scale is None else float(scale)  # if D is 0, q·k is 0

    @cached_property
    def window(self) -> tuple[int, int]:
        """(left, right) bounds of j − (i + offset). A problem is causal if its right bound is <= 0."""
        left, right = (UNBOUNDED if w < 0 else w for w in self.options.window)
        return left, min(right, 0) if self.options.causal else right

    def offset(self, q_len: Any, kv_len: Any) -> Any:
        """Return the default `Row.offset` for sequences of these lengths, which are numbers or arrays."""
        return kv_len - q_len if self.options.causal_alignment == "bottom_right" else 0

    @cached_property
    def has_columns(self) -> bool:
        """Whether D and Dv are positive. If D is 0, each score is 0 before its mask."""
        return min(self.head_dim, self.value_dim) > 0

    def has(self, name: str) -> bool:
        return name in self.tensors

    @cached_property
    def given(self) -> frozenset[str]:
        """The names of the tensors, and of the options whose values are not the default."""
        return self.options.given | self.tensors.keys()

    @cached_property
    def features(self) -> frozenset[str]:
        """The features that a backend must have for the problem: keys of `tensors.FEATURES`."""
        dtypes = tuple((name, info.dtype) for name, info in self.tensors.items())
        dims = self.head_dim, self.value_dim
        return _features(self.direction, self.options, self.dtype, dtypes, self.q_heads != self.kv_heads, *dims)

    @cached_property
    def level(self) -> int:
        """The kernel variant that the problem needs: the highest level of its features.

        0: causal or not, any lengths and heads, and a positive scale (the largest score stays the largest after
        scaling). 1: also window, any scale, and features that apply one number to a score or a row. 2: all options.
        There are only three, so that few variants are compiled; options that are cheap to switch at run time do not
        get their own variant.
        """
        return max(1 if self.scale < LEAST_NORMAL_FLOAT32 else 0, _level(self.features))

    @cached_property
    def outputs(self) -> dict[str, TensorInfo]:
        """The name, dtype and shape of every answer tensor, in the layout and rank of the inputs."""
        if self.direction == "backward":
            return {name: info for name in self.options.grads if (info := self.tensors.get(name[1:])) is not None}
        outputs = {"o": TensorInfo(self.dtype, self.shape_of("o"))}
        if self.options.return_lse:
            outputs["lse"] = TensorInfo("float32", self.lse_shape)
        if self.options.return_key_weights:
            outputs["key_weights"] = TensorInfo("float32", self.shape_of("key_weights"))
        return outputs

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, by the axis' name in `tensors`."""
        names = ("B", "B+1", "Hq", "Hk", "Sq", "Sk", "D", "Dv")
        heads, lengths = (self.q_heads, self.kv_heads), (self.q_len, self.kv_len)
        sizes = (self.batch, self.batch + 1, *heads, *lengths, self.head_dim, self.value_dim)
        by_axis = dict(zip(names, sizes, strict=True))
        by_axis |= {f"{of}_blocks": -(-n // m) for of, n, m in zip("qk", lengths, self.options.block_size, strict=True)}
        if self.paged:
            by_axis |= {"pool": self.pool, "pages": self.kv_len // self.page_size, "page_size": self.page_size}
        return by_axis

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the largest shape that a tensor of this name may have in this problem."""
        return TENSORS[name].shape(self.sizes, self.options.layout, self.rank)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        return self.shape_of("lse")

    @cached_property
    def forward(self) -> Spec:
        """For a gradient problem, the forward that returns its `o` and `lse`."""
        infos = {name: info for name, info in self.tensors.items() if name in FORWARD_TENSORS}
        return plan(infos, replace(self.options, return_lse=True), "forward")

    def with_keys(self, kv_len: int, tensors: Mapping[str, TensorInfo]) -> Spec:
        """Return this forward problem with another number of keys. Values that do not depend on it are reused."""
        spec = replace(self, kv_len=kv_len, tensors=tensors)
        names = ["given", "features", "level", "window", "lse_shape"]
        if not self.options.return_key_weights:  # their shape depends on the number of keys
            names.append("outputs")
        same = {name: getattr(self, name) for name in names}
        spec.__dict__.update(same)
        return spec

    @property
    def has_forward(self) -> bool:
        """Whether a gradient request contains `o` and `lse`, so that the forward need not run again."""
        return "lse" in self.tensors

    @property
    def causal_square(self) -> bool:
        """Whether the problem is causal with as many queries as keys, so that about half of all pairs are visible.

        False where a `Spec` does not know the number of visible pairs: for packed queries with pages of keys, and with
        `offset`.
        """
        square = self.options.causal and self.q_len == self.kv_len
        return square and not (self.ragged and self.paged) and not self.has("offset")

    @cached_property
    def flops(self) -> int:
        """The floating-point operations of the matrix products. They are an upper bound while lengths are unknown.

        The forward needs 2·Hq·Sq·Sk·(D + Dv) per sequence (FlashAttention-2, §4.1). Our two-pass backward computes S
        and dP twice: 7 products instead of 2, so 3.5 times as many. Key weights need S again, and the sums of its
        columns. Causal squares need half.
        """
        pairs = self.q_len * self.kv_len * (1 if self.ragged else self.batch)
        forward = 2 * self.q_heads * pairs * (self.head_dim + self.value_dim)
        weights = 2 * self.q_heads * pairs * (self.head_dim + 1) if self.options.return_key_weights else 0
        if self.causal_square:
            forward, weights = forward // 2, weights // 2
        if self.direction == "forward":
            return forward + weights
        return forward * 7 // 2 + (0 if self.has_forward else forward)

    @cached_property
    def input_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def output_bytes(self) -> int:
        return sum(info.nbytes for info in self.outputs.values())

    @cached_property
    def footprint(self) -> int:
        """The minimum bytes that the problem needs: inputs and answers. Backends need only a few tiles in addition.

        A dimension of 0 counts as 1, so that an empty tensor cannot hide the cost of the others.
        """
        tensors = [*self.tensors.values(), *self.outputs.values()]
        return sum(math.prod(max(n, 1) for n in t.shape) * ITEMSIZE[t.dtype] for t in tensors)

    def rows(self, index: Mapping[str, Any]) -> tuple[Row, ...]:
        """Return a `Row` for each sequence. `index` has the values of the index tensors. Raises ProblemError."""
        return self._rows_of(index) if index else self._whole_rows

    @cached_property
    def _whole_rows(self) -> tuple[Row, ...]:
        """A `Row` for each sequence of a problem that has no index tensors."""
        return self._rows_of({})

    def _rows_of(self, index: Mapping[str, Any]) -> tuple[Row, ...]:
        errors = []
        for name, total in (("cu_seqlens_q", self.q_len), ("cu_seqlens_k", self.kv_len)):
            if name in index and not _covers(index[name], total):
                errors.append((name, f"must start at 0, never decrease, and end at {total}"))
        for name, longest in (("q_lengths", self.q_len), ("kv_lengths", self.kv_len)):
            if name in index and any(not 0 <= n <= longest for n in index[name]):
                errors.append((name, f"must be between 0 and {longest}"))
        offset = index.get("offset")
        if offset is not None:
            offset = [offset] if isinstance(offset, int) else offset
            offset = offset * self.batch if len(offset) == 1 else offset
            if any(not -FARTHEST_OFFSET <= n <= FARTHEST_OFFSET for n in offset):
                errors.append(("offset", f"must be between -{FARTHEST_OFFSET} and {FARTHEST_OFFSET}"))
        if errors:
            raise ProblemError(errors)
        zero, q_rows, kv_rows = (itertools.repeat(n) for n in (0, self.q_len, self.kv_len))
        batch: Iterable[int] = zero if self.ragged else itertools.count()
        q: Sequence[Iterable[int]] = (zero, index.get("q_lengths") or [self.q_len] * self.batch, q_rows)
        k: Sequence[Iterable[int]] = (zero, index.get("kv_lengths") or [self.kv_len] * self.batch, kv_rows)
        if self.ragged:
            q = _between(index["cu_seqlens_q"])
        if self.paged:
            k = zero, index["kv_lengths"], index["kv_lengths"]
        elif self.ragged:
            k = _between(index["cu_seqlens_k"])
        if offset is None:
            offset = map(self.offset, q[1], k[1])
        return _rows(self.batch, batch, *q, *k, offset)


@lru_cache(1024)  # the arguments include no lengths, so that calls with ever more keys find the cached result
def _features(
    direction: Direction, options: Options, dtype: str, dtypes: tuple[tuple[str, str], ...], grouped: bool,
    head_dim: int, value_dim: int,
) -> frozenset[str]:  # fmt: skip
    """Return `Spec.features`. `dtypes` are the dtypes of the tensors by name."""
    used = {dtype}
    for name, option in OPTIONS.items():
        if option.feature is not None and option.asks(getattr(options, name)):
            used.add(option.feature.name)
    for name, of in dtypes:
        if (feature := TENSORS[name].feature(of)) is not None:
            used.add(feature.name)
    if grouped:
        used.add("gqa")
    if head_dim != value_dim:
        used.add("value_dim")
    if (widest := max(head_dim, value_dim)) > MAX_FUSED_HEAD_DIM:
        used.add("wide_head_dim" if widest <= MAX_HEAD_DIM else "large_head_dim")
    if direction == "backward":
        used.update({"backward", *(name for name in options.grads if name in FEATURES)})
    return frozenset(used)


@lru_cache(1024)
def _level(features: frozenset[str]) -> int:
    """Return the highest level of these features."""
    return max(FEATURES[name][1].level for name in features)


def _covers(starts: Sequence[int], total: int) -> bool:
    return starts[0] == 0 and starts[-1] == total and all(a <= b for a, b in itertools.pairwise(starts))


def _between(starts: Sequence[int]) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
    """Return the columns first row, valid rows and rows of the packed sequences with the boundaries `starts`.

    Packed sequences have no padding: all their rows are valid. The first column has one more item, the end.
    """
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    return starts, lengths, lengths


def _rows(count: int, *columns: Iterable[int]) -> tuple[Row, ...]:
    """Return `count` `Row`s. `columns` has the values of each field after `index`.

    The code is optimized, because there may be 65,536 rows.
    """
    return tuple(map(Row._make, zip(range(count), *columns, strict=False)))


def plan(tensors: Mapping[str, TensorInfo], options: Options, direction: Direction) -> Spec:
    """Check the names, dtypes and shapes of tensors, and the options. Return the problem. Raises ProblemError.

    `Spec.rows` later checks the values of index tensors (lengths, cu_seqlens).
    """
    return _plan(tuple(tensors.items()), options, direction)


@lru_cache(1024)  # cached, because a model repeats a few problems
def _plan(named: tuple[tuple[str, TensorInfo], ...], options: Options, direction: Direction) -> Spec:
    return _grown(named, options, direction) or _planned(named, options, direction)


def _grown(named: tuple[tuple[str, TensorInfo], ...], options: Options, direction: Direction) -> Spec | None:
    """Return the problem, made from the cached one of the same call with a single key; None if that is not possible.

    So a loop of calls whose number of keys grows is checked only once.
    """
    tensors = dict(named)
    k, v = tensors.get("k"), tensors.get("v")
    if direction == "backward" or k is None or v is None or not _ANY_LENGTH.issuperset(tensors):
        return None
    axis = 0 if options.layout == "thd" or len(k.shape) < 3 else len(k.shape) - 2 if options.layout == "bhsd" else 1
    if len(k.shape) != len(v.shape) or len(k.shape) < 2 or k.shape[axis] != v.shape[axis] or k.shape[axis] < 1:
        return None
    short = tuple((name, _one_key(info, axis) if name in ("k", "v") else info) for name, info in named)
    try:
        planned = _planned(short, options, direction)
    except ProblemError:
        return None  # let `_plan` check the call itself, so that the error texts have its sizes
    return planned.with_keys(k.shape[axis], tensors)


# `_grown` is for calls that have only these tensors: k, v, and those whose shapes do not depend on the number of keys.
_ANY_LENGTH = frozenset(
    ("q", "k", "v", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset", "cu_seqlens_q", "cu_seqlens_k")
)


def _one_key(info: TensorInfo, axis: int) -> TensorInfo:
    return TensorInfo(info.dtype, (*info.shape[:axis], 1, *info.shape[axis + 1 :]))


@lru_cache(1024)
def _planned(named: tuple[tuple[str, TensorInfo], ...], options: Options, direction: Direction) -> Spec:
    tensors = dict(named)
    known = TAKEN[direction]
    if refused := [name for name in tensors if name not in known]:
        raise ProblemError((name, why_not(name, known, hint)) for name, hint in each_meant(refused, known))
    if missing := [name for name in needed(options.layout, direction, "block_table" in tensors) if name not in tensors]:
        raise ProblemError((name, "missing") for name in missing)
    check_dtypes(tensors, direction)
    spec = _sizes(tensors, options, direction)
    errors = [*_check_shapes(spec), *_check_options(spec)]
    if errors:
        raise ProblemError(errors)
    return spec


def _sizes(tensors: Mapping[str, TensorInfo], options: Options, direction: Direction) -> Spec:
    ragged, paged = options.layout == "thd", "block_table" in tensors
    rank = len(tensors["q"].shape)
    if ragged and rank != 3:
        raise ProblemError([("q", f"must be (T,H,D) in layout thd, not {rank} dimensions")])
    if rank not in (2, 3, 4):
        raise ProblemError([("q", f"must have 2, 3 or 4 dimensions, not {rank}")])
    due = 4 if ragged and paged else rank
    if bad := [name for name in ("k", "v") if len(tensors[name].shape) != due]:
        where = "pages in layout thd need 4" if due != rank else f"q has {rank}"
        raise ProblemError((name, f"has {len(tensors[name].shape)} dimensions, but {where}") for name in bad)

    def split(name: str) -> tuple[int, int, int, int]:
        """Return (batch, heads, length, dim) of q, k or v."""
        shape = tensors[name].shape
        if len(shape) == 4:
            b, x, y, d = shape
            return (b, x, y, d) if options.layout == "bhsd" else (b, y, x, d)
        if ragged:
            return 0, shape[1], shape[0], shape[2]
        return (shape[0] if rank == 3 else 1), 1, shape[-2], shape[-1]

    (batch, q_heads, q_len, head_dim), (kb, kv_heads, kv_len, kd) = split("q"), split("k")
    vb, v_heads, v_len, value_dim = split("v")
    errors = []
    if paged and (vb, v_heads, v_len) != (kb, kv_heads, kv_len):
        errors.append(("v", f"pages, heads and page size {(vb, v_heads, v_len)} must be k's, {(kb, kv_heads, kv_len)}"))
    elif not paged and (kb != batch or vb != batch):
        errors.append(("k" if kb != batch else "v", f"batch {kb if kb != batch else vb} must be q's, {batch}"))
    elif v_heads != kv_heads or v_len != kv_len:
        errors.append(("v", f"heads and length {(v_heads, v_len)} must be k's, {(kv_heads, kv_len)}"))
    if kd != head_dim:
        errors.append(("k", f"head dimension {kd} must be q's, {head_dim}"))
    if q_heads == 0 or kv_heads == 0 or q_heads % kv_heads:
        errors.append(("q", f"its {q_heads} heads must be a positive multiple of k's {kv_heads}"))
    if ragged:
        ends = "cu_seqlens_q" if paged else "cu_seqlens_k"
        shapes = [tensors["cu_seqlens_q"].shape, tensors[ends].shape]
        if len(shapes[0]) != 1 or shapes[0][0] < 1 or shapes[0] != shapes[1]:
            errors.append((ends, f"both cu_seqlens must have the same shape (n+1,), not {shapes}"))
        else:
            batch = shapes[0][0] - 1
    of_pages = {}
    if paged:
        table = tensors["block_table"].shape
        if len(table) != 2:
            errors.append(("block_table", f"shape {list(table)} must be (B,pages)"))
        elif kv_len < 1:
            errors.append(("k", "a page must have at least 1 key"))
        else:
            of_pages, kv_len = {"pool": kb, "page_size": kv_len}, table[1] * kv_len
    if errors:
        raise ProblemError(errors)
    return Spec(
        direction, options, dict(tensors), rank, batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim,
        tensors["q"].dtype, **of_pages,
    )  # fmt: skip


def _check_shapes(spec: Spec) -> Iterable[tuple[str, str]]:
    layout = spec.options.layout
    for name, info in spec.tensors.items():
        row = TENSORS[name]
        if row.has_columns and row.direction == "forward":  # q, k and v: `_sizes` has checked them
            continue
        full = spec.shape_of(name)
        if spec.paged and name == "cu_seqlens_k":
            yield name, "cannot be combined with block_table: send kv_lengths instead"
        elif layout not in row.layouts and not (spec.paged and name == "kv_lengths"):
            yield name, f"is only for layout {' and '.join(row.layouts)}, not {layout}"
        elif row.broadcast:
            padded = (1,) * (len(full) - len(info.shape)) + info.shape
            smallest = row.smallest_shape(spec.sizes, layout, spec.rank)
            if len(padded) > len(full) or any(n not in (m, f) for n, m, f in zip(padded, smallest, full, strict=True)):
                yield name, f"shape {list(info.shape)} does not broadcast to {list(full)}{_of_blocks(spec, row)}"
        elif info.shape not in (allowed := _allowed(spec, row, full)):
            yield name, f"shape {list(info.shape)} must be {' or '.join(str(list(shape)) for shape in allowed)}"


def _of_blocks(spec: Spec, row: Tensor) -> str:
    """Return the text about block sizes for an error about `block_mask`; "" for other tensors."""
    return f", of blocks of {' x '.join(map(str, spec.options.block_size))}" if "q_blocks" in row.axes else ""


def _allowed(spec: Spec, row: Tensor, full: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that the tensor `row` may have. `full` is the largest of them."""
    if row.scale_of:
        return list(dict.fromkeys([(), (1, spec.kv_heads), (spec.batch, spec.kv_heads), full]))
    if row.may_be_number:
        return list(dict.fromkeys([(), (1,), full]))
    return [full[1:], full] if row.shared else [full]


def _check_options(spec: Spec) -> Iterable[tuple[str, str]]:
    o, t = spec.options, spec.tensors
    if ("o" in t) != ("lse" in t):
        missing = "lse" if "o" in t else "o"
        yield missing, "send o and lse together: with both, the forward is not run again"
    if "offset" in t and o.causal_alignment != "bottom_right":
        yield "offset", "cannot be combined with causal_alignment top_left, which is an offset of 0"
    if spec.direction == "backward":
        if o.return_key_weights:
            yield "return_key_weights", "is only for the forward: key weights have no gradient"
        if o.dropout_p and o.dropout_seed is None:
            yield "dropout_seed", "is required: a gradient with dropout needs the forward's seed"
        for name in o.grads:
            row = TENSORS[name[1:]]
            if row.name not in t or t[row.name].dtype == "bool":
                kind = "a float " if "bool" in row.dtypes else ""
                yield "grads", f"{name} needs {kind}{row.name}"
