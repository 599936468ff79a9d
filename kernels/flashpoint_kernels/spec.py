"""What is asked, as plain data: options, shapes and dtypes checked and priced before any tensor is touched.

Nothing here imports torch, so a process that only reads the head of a message can validate and price the whole problem.

Notation: B batch, Sq and Sk query and key lengths, Hq and Hk query and key/value heads, D query/key head dimension,
Dv value head dimension. In the ragged layout `thd` Sq and Sk are the packed totals Tq and Tk, and B counts sequences.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, cast

Direction = Literal["forward", "backward"]

LAYOUTS = ("bhsd", "bshd", "thd")
ALIGNMENTS = ("bottom_right", "top_left")
PRECISIONS = ("ieee", "tf32")
BACKENDS = ("triton", "torch", "tiled", "reference")
GRADS = ("dq", "dk", "dv", "dattn_mask", "dsinks")

ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int32", "int64")

FORWARD_TENSORS = (
    "q", "k", "v", "attn_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
BACKWARD_TENSORS = (*FORWARD_TENSORS, "do", "dlse", "o", "lse")
INDEX_TENSORS = ("q_lengths", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")

MAX_HEAD_DIM = 256  # of every backend but `reference`
UNBOUNDED = 1 << 30  # stands for "no bound" in a window; far beyond any length, far from int32's edge


class ProblemError(ValueError):
    """The problem is not valid. `errors` holds one (field, message) pair for each thing that is wrong."""

    def __init__(self, errors: Iterable[tuple[str, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(f"{field}: {message}" for field, message in self.errors))


class TensorInfo(NamedTuple):
    """A tensor's dtype (as in `ITEMSIZE`) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


LARGEST_FLOAT32, LEAST_NORMAL_FLOAT32 = 3.4028234663852886e38, 1.1754943508222875e-38


def _integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(value: object) -> bool:
    """A finite number that float32 holds: kernels compute with it in float32."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return -LARGEST_FLOAT32 <= cast(float, value) <= LARGEST_FLOAT32  # NaN is not, and an int may be of any size


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the public contract, checked. Raises ProblemError naming every field that is wrong."""

    layout: str = "bhsd"
    causal: bool = False
    causal_alignment: str = "bottom_right"
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    precision: str = "ieee"
    return_lse: bool = False
    grads: tuple[str, ...] = ("dq", "dk", "dv")
    deterministic: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        errors = []

        def one_of(field: str, allowed: tuple[str, ...]) -> None:
            if getattr(self, field) not in allowed:
                errors.append((field, f"must be one of {', '.join(allowed)}"))

        one_of("layout", LAYOUTS)
        one_of("causal_alignment", ALIGNMENTS)
        one_of("precision", PRECISIONS)
        one_of("backend", ("auto", *BACKENDS))
        for field in ("causal", "return_lse", "deterministic"):
            if not isinstance(getattr(self, field), bool):
                errors.append((field, "must be a bool"))
        if isinstance(self.window, Sequence) and not isinstance(self.window, str):
            object.__setattr__(self, "window", tuple(self.window))
        if not (
            isinstance(self.window, tuple)
            and len(self.window) == 2
            and all(_integer(w) and -1 <= w <= UNBOUNDED for w in self.window)
        ):
            errors.append(("window", "must be two integers [left, right], each -1 (no bound) or 0 to 2^30"))
        if self.scale is not None and not _number(self.scale):
            errors.append(("scale", "must be a number within float32's range"))
        if not _number(self.softcap) or 0 != self.softcap < LEAST_NORMAL_FLOAT32:
            errors.append(("softcap", "must be 0 (off) or a positive number within float32's normal range"))
        if not _number(self.dropout_p) or not 0 <= self.dropout_p < 1:
            errors.append(("dropout_p", "must be a number with 0 <= dropout_p < 1"))
        if self.dropout_seed is not None and not (_integer(self.dropout_seed) and 0 <= self.dropout_seed < 1 << 64):
            errors.append(("dropout_seed", "must be an integer from 0 to 2^64 - 1"))
        if isinstance(self.grads, Sequence) and not isinstance(self.grads, str):
            object.__setattr__(self, "grads", tuple(self.grads))
        if not isinstance(self.grads, tuple) or not self.grads:
            errors.append(("grads", "must name at least one gradient"))
        elif unknown := [g for g in self.grads if g not in GRADS]:
            errors.append(("grads", f"{unknown[0]!r} is none of {', '.join(GRADS)}"))
        elif len(set(self.grads)) < len(self.grads):
            errors.append(("grads", "names a gradient twice"))
        if errors:
            raise ProblemError(errors)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # they are looked up with each request, and thirteen fields take a while
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


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
        """What the problem asks of a backend, in the words of `support.SUPPORT`."""
        o, t = self.options, self.tensors
        used = {self.dtype}
        if o.causal:
            used.add("causal")
        if o.window != (-1, -1):
            used.add("window")
        if self.q_heads != self.kv_heads:
            used.add("gqa")
        if self.ragged:
            used.add("thd")
        if o.softcap:
            used.add("softcap")
        if o.dropout_p:
            used.add("dropout")
        if o.precision == "tf32":
            used.add("tf32")
        if self.head_dim != self.value_dim:
            used.add("value_dim")
        if max(self.head_dim, self.value_dim) > MAX_HEAD_DIM:
            used.add("large_head_dim")
        if "q_lengths" in t or "kv_lengths" in t:
            used.add("lengths")
        if "attn_mask" in t:
            used.add("bool_mask" if t["attn_mask"].dtype == "bool" else "float_mask")
        used.update({"alibi_slopes", "sinks", "dlse"} & t.keys())
        if o.return_lse:
            used.add("lse")
        if self.direction == "backward":
            used.add("backward")
            used.update({"dattn_mask", "dsinks"} & set(o.grads))
        return frozenset(used)

    @property
    def level(self) -> int:
        """Which of three variants of a kernel the problem needs.

        0: causal or not, any lengths and heads, a positive scale (which the largest score then survives); 1: also
        window, softcap, sinks, any scale; 2: every option. Three, so that few variants are compiled, and options that
        are cheap to switch at run time cost no variant of their own.
        """
        if self.features & {"dropout", "bool_mask", "float_mask", "alibi_slopes"}:
            return 2
        return 1 if self.features & {"window", "softcap", "sinks"} or self.scale < LEAST_NORMAL_FLOAT32 else 0

    @cached_property
    def outputs(self) -> dict[str, TensorInfo]:
        """Name, dtype and shape of every answer tensor, in the layout and rank of the inputs."""
        q, k, v = self.tensors["q"], self.tensors["k"], self.tensors["v"]
        o = TensorInfo(self.dtype, (*q.shape[:-1], self.value_dim))
        if self.direction == "forward":
            return {"o": o, "lse": TensorInfo("float32", self.lse_shape)} if self.options.return_lse else {"o": o}
        sources = {"dq": q, "dk": k, "dv": v, **{f"d{n}": self.tensors.get(n) for n in ("attn_mask", "sinks")}}
        return {name: info for name in self.options.grads if (info := sources[name]) is not None}

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        if self.ragged:
            return (self.q_heads, self.q_len)
        return {4: (self.batch, self.q_heads, self.q_len), 3: (self.batch, self.q_len), 2: (self.q_len,)}[self.rank]

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
    needed = ["q", "k", "v"] + (["do"] if direction == "backward" else [])
    if options.layout == "thd":
        needed += ["cu_seqlens_q", "cu_seqlens_k"]
    if missing := [name for name in needed if name not in tensors]:
        raise ProblemError((name, "missing") for name in missing)
    _check_dtypes(tensors)
    spec = _sizes(tensors, options, direction)
    errors = [*_check_shapes(spec), *_check_options(spec)]
    if errors:
        raise ProblemError(errors)
    return spec


def _check_dtypes(tensors: Mapping[str, TensorInfo]) -> None:
    errors = []
    dtype = tensors["q"].dtype
    for name, info in tensors.items():
        if name == "q" and dtype not in FLOATS:
            errors.append((name, f"dtype {dtype} is none of {', '.join(FLOATS)}"))
        elif name in ("k", "v", "do", "o") and info.dtype != dtype:
            errors.append((name, f"dtype {info.dtype} is not q's {dtype}"))
        elif name in INDEX_TENSORS and info.dtype not in INTS:
            errors.append((name, f"dtype {info.dtype} must be int32 or int64"))
        elif name == "attn_mask" and info.dtype not in ("bool", *FLOATS):
            errors.append((name, f"dtype {info.dtype} must be bool or a float"))
        elif name in ("alibi_slopes", "sinks") and info.dtype not in FLOATS:
            errors.append((name, f"dtype {info.dtype} must be a float"))
        elif name in ("lse", "dlse") and info.dtype not in ("float32", "float64"):
            errors.append((name, f"dtype {info.dtype} must be float32"))
        elif any(n < 0 for n in info.shape):
            errors.append((name, f"shape {list(info.shape)} has a negative dimension"))
    if errors:
        raise ProblemError(errors)


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
    q = spec.tensors["q"].shape
    expected: dict[str, tuple[tuple[int, ...], ...]] = {
        "do": ((*q[:-1], spec.value_dim),),
        "o": ((*q[:-1], spec.value_dim),),
        "lse": (spec.lse_shape,),
        "dlse": (spec.lse_shape,),
        "alibi_slopes": ((spec.q_heads,), (spec.batch, spec.q_heads)),
        "sinks": ((spec.q_heads,),),
        "q_lengths": ((spec.batch,),),
        "kv_lengths": ((spec.batch,),),
    }
    for name, shapes in expected.items():
        if name in spec.tensors and spec.tensors[name].shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            yield name, f"shape {list(spec.tensors[name].shape)} must be {wanted}"
    if spec.ragged:
        for name in ("attn_mask", "q_lengths", "kv_lengths"):
            if name in spec.tensors:
                yield name, "is not taken in layout thd"
    else:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in spec.tensors:
                yield name, "is taken in layout thd alone"
        if "attn_mask" in spec.tensors:
            mask, full = spec.tensors["attn_mask"].shape, mask_shape(spec)
            padded = (1,) * (len(full) - len(mask)) + mask
            if len(mask) > len(full) or any(m not in (1, f) for m, f in zip(padded, full, strict=True)):
                yield "attn_mask", f"shape {list(mask)} does not broadcast to {list(full)}"


def mask_shape(spec: Spec) -> tuple[int, ...]:
    """What `attn_mask` broadcasts to: (B,Hq,Sq,Sk), or (B,Sq,Sk) and (Sq,Sk) for 3-D and 2-D q."""
    return {4: (spec.batch, spec.q_heads), 3: (spec.batch,), 2: ()}[spec.rank] + (spec.q_len, spec.kv_len)


def _check_options(spec: Spec) -> Iterable[tuple[str, str]]:
    o, t = spec.options, spec.tensors
    if ("o" in t) != ("lse" in t):
        missing = "lse" if "o" in t else "o"
        yield missing, "o and lse come together: with both, the forward is not run again"
    if spec.direction == "backward":
        if o.dropout_p and o.dropout_seed is None:
            yield "dropout_seed", "a gradient with dropout needs the forward's seed"
        if "dattn_mask" in o.grads and ("attn_mask" not in t or t["attn_mask"].dtype == "bool"):
            yield "grads", "dattn_mask needs a float attn_mask"
        if "dsinks" in o.grads and "sinks" not in t:
            yield "grads", "dsinks needs sinks"
