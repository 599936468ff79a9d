"""The table of tensors: one row for each, with its axes, dtypes and meaning.

B is the batch, Sq and Sk are the query and key lengths, Hq and Hk the query and key/value heads, D and Dv the head
dimensions of q and of v. In the ragged layout `thd`, Sq and Sk are the packed totals Tq and Tk, and B is the number of
sequences.

With `block_table`, k and v are "pool" pages of "page_size" keys each, instead of B sequences of Sk. A sequence has at
most "pages" of them, and Sk is pages·page_size, the maximum number of its keys.

`block_mask` has a boolean for each block of Mq queries and Mk keys (option `block_size`): "q_blocks" of them along Sq,
and "k_blocks" along Sk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from flashpoint_contract.options import GRADS, LAYOUTS, OPTIONS, Direction, Feature, ProblemError
from flashpoint_contract.surfaces import completed

ITEMSIZE = {
    "bool": 1, "int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "int32": 4, "int64": 8,
}  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT_BIT = ("float8_e4m3fn", "int8")  # dtypes of k and v with scales
INTS = ("int32", "int64")

MAX_HEAD_DIM = 576  # maximum of D and Dv on all backends except `torch` and `reference`, which has no maximum
MAX_FUSED_HEAD_DIM = 256  # maximum of D and Dv on `torch`; a problem above it has the feature `wide_head_dim`


class TensorInfo(NamedTuple):
    """The dtype (a key of `ITEMSIZE`) and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Tensor(NamedTuple):
    """One row of the table of tensors."""

    name: str
    axes: tuple[str, ...]  # in layout `bhsd`, for q of four dimensions
    text: str
    dtypes: tuple[str, ...] = FLOATS
    like_q: bool = False  # the tensor has q's dtype, which is one of `dtypes`, or one of `quantized`
    quantized: tuple[str, ...] = ()
    direction: Direction = "forward"  # "backward" for tensors of the gradient call only
    forward_only: bool = False  # the gradient call does not accept it
    required: bool = False
    gradient: bool = False  # the tensor has a gradient of the same shape and dtype
    broadcast: tuple[str, ...] = ()  # axes that may be 1, and that may be missing at the front
    shared: bool = False  # the first axis may be missing; the tensor is then shared along it
    scale_of: str = ""  # the 8-bit tensor that this one scales; it may be a number, (1,Hk), (B,Hk) or of shape `axes`
    layouts: tuple[str, ...] = LAYOUTS
    features: tuple[tuple[str, Feature], ...] = ()  # features that it needs, by dtype; "" means any dtype
    refused: Mapping[str, str] = MappingProxyType({})  # as in `options.Option.refused`

    @property
    def is_index(self) -> bool:
        """Whether the tensor contains lengths or positions of sequences, whose values `Spec.rows` reads."""
        return self.dtypes == INTS

    @property
    def may_be_number(self) -> bool:
        """Whether a single number may replace the tensor."""
        return bool(self.scale_of) or (self.is_index and self.shared)

    @property
    def has_columns(self) -> bool:
        """Whether each row of the tensor has D or Dv numbers."""
        return self.axes[-1] in ("D", "Dv")

    @property
    def in_layout(self) -> bool:
        """Whether the order of the tensor's axes depends on the layout."""
        return self.has_columns or bool(self.scale_of)

    @property
    def per_head(self) -> bool:
        """Whether the tensor has one number for each head, or for each sequence and head."""
        return self.axes[-1] == "Hq"

    @property
    def of_keys(self) -> bool:
        """Whether the tensor has rows for keys and heads for key/value heads, as k and v have."""
        return "Hk" in self.axes

    def head_axis(self, layout: str) -> int | None:
        """Return the axis of the heads, counted from the end, or None."""
        if self.in_layout:
            return (-2 if layout == "bhsd" else -1) - self.has_columns
        axes = [axis - len(self.axes) for axis, name in enumerate(self.axes) if name in ("Hq", "Hk")]
        return axes[0] if axes else None

    def axes_in(self, layout: str, rank: int, *, paged: bool = False) -> tuple[str, ...]:
        """Return the tensor's axes in order, for q of `rank` dimensions; with `paged`, keys are in pages."""
        axes = list(self.axes)
        if not _LENGTHWISE.isdisjoint(axes):
            # key weights are those of a sequence's own keys, wherever its pages are
            own = paged and self.axes[-1] == "Sk" and not self.of_keys
            paged = self.of_keys and paged
            if paged:
                axes[axes.index("B")], axes[axes.index("Sk")] = "pool", "page_size"
            ragged = layout == "thd" and not paged and not own
            one_head = layout != "thd" and rank < 4
            if self.in_layout and layout != "bhsd" and not one_head:
                axes[1], axes[2] = axes[2], axes[1]
            if ragged or (one_head and rank < 3):
                del axes[0]
            if one_head:
                axes = [axis for axis in axes if axis not in ("Hq", "Hk")]
        return tuple(axes)

    def shape(self, sizes: Mapping[str, int], layout: str, rank: int) -> tuple[int, ...]:
        """Return the tensor's largest shape for q of `rank` dimensions.

        `sizes` are the sizes of the axes by name. It has "page_size" if k and v are pages.
        """
        return tuple(sizes[axis] for axis in self.axes_in(layout, rank, paged="page_size" in sizes))

    def smallest_shape(self, sizes: Mapping[str, int], layout: str, rank: int) -> tuple[int, ...]:
        """Return the shape `shape(…)` with 1 for each axis that may be 1."""
        return self.shape({axis: 1 if axis in self.broadcast else n for axis, n in sizes.items()}, layout, rank)

    def feature(self, dtype: str) -> Feature | None:
        """Return the feature that a backend needs for the tensor in this dtype."""
        return next((feature for of, feature in self.features if of in ("", dtype)), None)


_LENGTHWISE = frozenset({"Sq", "Sk", "q_blocks", "k_blocks"})  # axes that depend on the lengths of sequences
_BY_AUTOGRAD = {"torch": "autograd passes it to the backward", "jax": "autodiff passes it to the backward"}
_DENSE = ("bhsd", "bshd")
_LENGTHS = (("", Feature("lengths", "q_lengths and kv_lengths")),)
_BOOL_MASK = Feature("bool_mask", "a boolean mask", level=2, per_score=True)
_FLOAT_MASK = Feature("float_mask", "a float mask", level=2, per_score=True)
_SERVER = ("json", "safetensors", "oip", "grpc")
_CLIENTS = ("sdk", "async", "torch", "jax", "sharded", "cli")
_SCALES_REFUSED = {
    "json": "is for 8-bit k and v, but JSON has one dtype for q, k and v: send safetensors",
    "jax": "is only for the forward, but calls in JAX are differentiable",
}
_OF_PAGES = "is for pages in the caller's memory, which only the kernel library (flashpoint_kernels) reads"

_ROWS = (
    Tensor(
        "q", ("B", "Hq", "Sq", "D"),
        "(B,Hq,Sq,D) in layout bhsd, (B,Sq,Hq,D) in bshd, (Tq,Hq,D) in thd; also (B,S,D) and (S,D), as one head",
        like_q=True, required=True, gradient=True,
    ),
    Tensor(
        "k", ("B", "Hk", "Sk", "D"), "(B,Hk,Sk,D), likewise",
        like_q=True, quantized=EIGHT_BIT, required=True, gradient=True,
    ),
    Tensor(
        "v", ("B", "Hk", "Sk", "Dv"), "(B,Hk,Sk,Dv), likewise",
        like_q=True, quantized=EIGHT_BIT, required=True, gradient=True,
    ),
    Tensor(
        "attn_mask", ("B", "Hq", "Sq", "Sk"),
        "booleans (true: visible) or numbers (added to the scaled scores), broadcastable to (B,Hq,Sq,Sk)",
        dtypes=("bool", *FLOATS), gradient=True, broadcast=("B", "Hq", "Sq", "Sk"), layouts=_DENSE,
        features=(("bool", _BOOL_MASK), ("", _FLOAT_MASK)),
    ),
    Tensor(
        "block_mask", ("B", "Hq", "q_blocks", "k_blocks"),
        "(B or 1,Hq or 1,ceil(Sq/Mq),ceil(Sk/Mk)) booleans: blocks of block_size that are false are skipped",
        dtypes=("bool",), broadcast=("B", "Hq"), layouts=_DENSE,
        features=(("", Feature("block_mask", "a block mask")),),
        refused={"sharded": "needs whole sequences, which a shard does not have"},
    ),
    Tensor(
        "alibi_slopes", ("B", "Hq"), "(Hq,) or (B,Hq): slope·|i + offset - j| is subtracted from the score",
        shared=True, features=(("", Feature("alibi_slopes", level=2, per_score=True)),),
    ),
    Tensor(
        "sinks", ("Hq",), "(Hq,): an additional logit for each head, only in the softmax's denominator",
        gradient=True, features=(("", Feature("sinks", level=1)),),
    ),
    Tensor(
        "q_lengths", ("B",), "(B,): valid queries of padded sequences",
        dtypes=INTS, layouts=_DENSE, features=_LENGTHS,
    ),
    Tensor(
        "kv_lengths", ("B",), "(B,): valid keys of padded sequences", dtypes=INTS, layouts=_DENSE, features=_LENGTHS
    ),
    Tensor(
        "offset", ("B",), "a number or (B,): the key at which query 0 is, for causal, window and alibi_slopes",
        dtypes=INTS, shared=True,
    ),
    Tensor(
        "cu_seqlens_q", ("B+1",), "(B+1,): where sequences begin in Tq, in layout thd", dtypes=INTS, layouts=("thd",)
    ),
    Tensor(
        "cu_seqlens_k", ("B+1",), "(B+1,): where sequences begin in Tk, in layout thd", dtypes=INTS, layouts=("thd",)
    ),
    Tensor(
        "block_table", ("B", "pages"),
        "(B,pages): page numbers of each sequence; k and v are then pages of page_size keys",
        dtypes=("int32",), forward_only=True, features=(("", Feature("paged", "pages")),),
        refused=dict.fromkeys((*_SERVER, *_CLIENTS), _OF_PAGES),
    ),
    Tensor(
        "k_scale", ("B", "Hk", "Sk"), "factor of an 8-bit k: (), (B or 1,Hk), or k's shape without D",
        forward_only=True, scale_of="k", features=(("", Feature("quantized", "8-bit keys and values")),),
        refused=_SCALES_REFUSED,
    ),
    Tensor(
        "v_scale", ("B", "Hk", "Sk"), "factor of an 8-bit v: (), (B or 1,Hk), or v's shape without Dv",
        forward_only=True, scale_of="v", refused=_SCALES_REFUSED,
    ),
    Tensor(
        "do", ("B", "Hq", "Sq", "Dv"), "the gradient of o, of o's shape",
        like_q=True, direction="backward", required=True, refused=_BY_AUTOGRAD,
    ),
    Tensor(
        "dlse", ("B", "Hq", "Sq"), "the gradient of lse, of its shape",
        dtypes=("float32", "float64"), direction="backward", features=(("", Feature("dlse")),), refused=_BY_AUTOGRAD,
    ),
    Tensor(
        "o", ("B", "Hq", "Sq", "Dv"), "the forward's answer; with it and lse the forward is not run again",
        like_q=True, direction="backward", refused=_BY_AUTOGRAD,
    ),
    Tensor(
        "lse", ("B", "Hq", "Sq"), "(B,Hq,Sq), in layout thd (Hq,Tq)",
        dtypes=("float32", "float64"), direction="backward", refused=_BY_AUTOGRAD,
    ),
)  # fmt: skip


def _gradient(name: str) -> Tensor:
    of = next(row for row in _ROWS if row.name == name[1:])
    plain = of._replace(required=False, quantized=(), gradient=False, features=())
    return plain._replace(name=name, text=f"of the shape of {of.name}")


_KEY_WEIGHTS = Tensor(
    "key_weights", ("B", "Hq", "Sk"), "(B,Hq,Sk), in layout thd (Hq,Tk): the sum over queries of a key's probability",
    dtypes=("float32",),
)  # fmt: skip
TENSORS: dict[str, Tensor] = {
    row.name: row._replace(refused=completed(row.name, row.refused))
    for row in (*_ROWS, _KEY_WEIGHTS, *map(_gradient, GRADS))
}

INPUT_TENSORS = tuple(row.name for row in _ROWS)
FORWARD_TENSORS = tuple(row.name for row in _ROWS if row.direction == "forward")  # the forward's inputs
BACKWARD_TENSORS = tuple(row.name for row in _ROWS if not row.forward_only)
TAKEN: dict[Direction, tuple[str, ...]] = {"forward": FORWARD_TENSORS, "backward": BACKWARD_TENSORS}
SCALES = tuple(row.name for row in _ROWS if row.scale_of)
INDEX_TENSORS = tuple(row.name for row in _ROWS if row.is_index)
REQUIRED: dict[Direction, tuple[str, ...]] = {
    "forward": tuple(row.name for row in _ROWS if row.required and row.direction == "forward"),
    "backward": tuple(row.name for row in _ROWS if row.required),
}
ANSWERS: dict[Direction, tuple[str, ...]] = {"forward": ("o", "lse", "key_weights"), "backward": GRADS}
JUDGED = ("o", "lse", *GRADS)  # answers that a verification judges

# Optional inputs of a problem with random tensors (`/verify`). A mask is named by its kind, such as `bool_mask`.
EXTRAS = tuple(
    name
    for row in _ROWS
    if row.direction == "forward" and "bhsd" in row.layouts and not (row.required or row.forward_only)
    for name in ([feature.name for _, feature in row.features] if len(row.features) > 1 else [row.name])
)


def _features() -> dict[str, tuple[str, Feature]]:
    """Return each feature by name, with the tensor or option that needs it."""
    features: dict[str, tuple[str, Feature]] = {}
    for option in OPTIONS.values():
        if option.feature is not None:
            features[option.feature.name] = option.name, option.feature
    for row in _ROWS:
        features.update({feature.name: (row.name, feature) for _, feature in row.features})
    of_sizes = (
        ("k", Feature("gqa", "fewer key/value heads than query heads")),
        ("v", Feature("value_dim", "a value head dimension other than q's")),
        ("q", Feature("wide_head_dim", f"a head dimension above {MAX_FUSED_HEAD_DIM}")),
        ("q", Feature("large_head_dim", f"a head dimension above {MAX_HEAD_DIM} (D and Dv up to {MAX_HEAD_DIM})")),
        ("grads", Feature("backward", "gradients")),
        *(("grads", Feature(name, name)) for name in GRADS if not TENSORS[name[1:]].required),
        *(("q", Feature(dtype, dtype)) for dtype in FLOATS),
    )
    return features | {feature.name: (field, feature) for field, feature in of_sizes}


FEATURES = _features()


def refusals(surface: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, reason) for each tensor and option that `surface` refuses. Ignore names of no row."""
    rows = [TENSORS.get(name) or OPTIONS[name] for name in names if name in TENSORS or name in OPTIONS]
    return [(row.name, row.refused[surface]) for row in rows if surface in row.refused]


def why_not(name: str, known: Sequence[str], hint: str) -> str:
    """Return the error text for a tensor `name` that a call does not accept; `known` are the accepted names."""
    if name in TENSORS and TENSORS[name].forward_only:
        return "is only for the forward: pages and 8-bit keys have no gradient"
    return f"unknown tensor{hint or '; known are ' + ', '.join(known)}"


def needed(layout: str, direction: Direction, paged: bool = False) -> list[str]:
    """Return the required tensors of a call."""
    names = [name for name in TAKEN[direction] if TENSORS[name].required or TENSORS[name].layouts == (layout,)]
    return [*(name for name in names if name != "cu_seqlens_k"), "kv_lengths"] if paged else names


def check_dtypes(tensors: Mapping[str, TensorInfo], direction: Direction) -> None:
    """Raise ProblemError for dtypes that tensors of a call may not have, and for missing or needless scales."""
    errors = []
    dtype, forward = tensors["q"].dtype, direction == "forward"
    for name, info in tensors.items():
        row = TENSORS[name]
        if row.like_q and name != "q":
            if info.dtype != dtype and dtype in TENSORS["q"].dtypes and not (forward and info.dtype in row.quantized):
                errors.append((name, f"dtype {info.dtype} must be q's, {dtype}"))
        elif info.dtype not in row.dtypes:
            errors.append((name, f"dtype {info.dtype} must be {_or(row)}"))
        if any(n < 0 for n in info.shape):
            errors.append((name, f"shape {list(info.shape)} has a negative dimension"))
    if errors := errors or [*_check_scales(tensors)]:
        raise ProblemError(errors)


def _check_scales(tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, str]]:
    """Yield errors if 8-bit k and v have different dtypes, or if scales are missing or not needed."""
    k, v = tensors["k"].dtype, tensors["v"].dtype
    if v != k and not {k, v}.isdisjoint(EIGHT_BIT):
        yield "v", f"dtype {v} must be k's, {k}"
    for name in SCALES:
        of, dtype = TENSORS[name].scale_of, tensors[TENSORS[name].scale_of].dtype
        if dtype in EIGHT_BIT and name not in tensors:
            yield name, f"missing: {of} is {dtype} and needs a scale"
        elif dtype not in EIGHT_BIT and name in tensors:
            yield name, f"is only for {of} in {' or '.join(EIGHT_BIT)}, not in {dtype}"


def _or(row: Tensor) -> str:
    """Return the dtypes that the tensor `row` may have, as text for an error message."""
    *others, last = row.dtypes
    return f"{', '.join(others)} or {last}" if others else last
