"""Attention over KV caches on a server: the options that such calls have in addition to `options.Options`, and checks.

A cache has the keys and values of one sequence, for every layer of a model. A call over caches sends q, and k and v of
new tokens if there are any; otherwise it is like any other call. The checks (`plan_cached`) need the caches' heads,
dimensions and dtype, but not their lengths, which only the server's engine process knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import EIGHT_BIT, TENSORS, TensorInfo, refusals

MOST_CACHES = 4096  # maximum number of caches in one call
MOST_TOKENS = 1 << 31  # maximum number of tokens in one cache
CHUNK = 1024  # tokens of a layer in one block of memory; docs/decisions compares 1024 with 256 and 512
SMALLEST_CHUNK = 16  # in tokens: the rows of one head then fill whole cache lines, so every head is aligned
ID_LENGTH = 1152  # maximum characters of a cache's id
_ANY_LENGTH = 1024  # number of keys that checks assume, because only the engine knows the true number
_ELSEWHERE = "is only for POST /attention over caches, in JSON or safetensors, and for the SDK's attention"


def chunk_tokens(filled: int) -> int:
    """Return the capacity in tokens of a chunk that holds `filled` tokens. Chunks grow by doubling."""
    return max(SMALLEST_CHUNK, 1 << (filled - 1).bit_length())


def layer_tokens(length: int) -> int:
    """Return the capacity in tokens of a layer: whole chunks, and a last chunk that grows by doubling."""
    whole, filled = divmod(length, CHUNK)
    return whole * CHUNK + (chunk_tokens(filled) if filled else 0)


class CacheOption(NamedTuple):
    """One row of `CACHE_OPTIONS`, the table of options for calls over caches."""

    name: str
    default: Any
    text: str


CACHE_OPTIONS: dict[str, CacheOption] = {
    row.name: row
    for row in (
        CacheOption("caches", None, "ids of caches, one for each sequence of q; they replace k and v"),
        CacheOption("layer", 0, "the layer of the caches"),
        CacheOption(
            "at", None, "positions, one for each sequence, where k and v are written; later tokens are removed"
        ),
    )
}
DTYPES = ("float16", "bfloat16", "float32")  # dtypes of q, of new k and v, and of caches that are not 8-bit


class LayerShape(NamedTuple):
    """The sizes and dtype of one layer of a KV cache, without its number of tokens."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str

    @property
    def quantized(self) -> bool:
        """Whether the cache is 8-bit, with a scale for each token and head."""
        return self.dtype in EIGHT_BIT

    @property
    def taken(self) -> tuple[str, ...]:
        """The dtypes that q, new k and new v may have."""
        return DTYPES if self.quantized else (self.dtype,)


@dataclass(frozen=True)
class CacheOptions:
    """The checked values of CACHE_OPTIONS in a call."""

    caches: tuple[str, ...]
    layer: int = 0
    at: tuple[int, ...] | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CacheOptions:
        """Return the options about caches in a JSON object. Raises ProblemError."""
        errors = []
        caches, layer, at = (options.get(name, row.default) for name, row in CACHE_OPTIONS.items())
        if not (_listed(caches) and caches and all(isinstance(one, str) for one in caches)):
            errors.append(("caches", "must be a list of ids"))
        elif len(caches) > MOST_CACHES:
            errors.append(("caches", f"{len(caches)} caches exceed the limit of {MOST_CACHES} for one call"))
        if not _is_size(layer):
            errors.append(("layer", "must be an integer, 0 or more"))
        if at is not None and not (_listed(at) and all(map(_is_size, at))):
            errors.append(("at", "must be a list of positions, 0 or more"))
        elif at is not None and _listed(caches) and len(at) != len(caches):
            errors.append(("at", f"has {len(at)} positions for {len(caches)} caches"))
        if errors:
            raise ProblemError(errors)
        return cls(tuple(caches), layer, None if at is None else tuple(at))


def _listed(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_TOKENS


def refused(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (option, reason) for each of `names` that only calls over caches accept."""
    return [(name, _ELSEWHERE) for name in names if name in CACHE_OPTIONS]


def plan_cached(tensors: Mapping[str, TensorInfo], options: Options, layer: LayerShape, caches: int) -> Spec:
    """Check an attention call over `caches` caches, and return its problem (`Spec`). Raises ProblemError.

    The `Spec` has as many keys as the call's mask covers, or _ANY_LENGTH without a mask.
    """
    errors = refusals("caches", [*tensors, *options.given])
    if ("k" in tensors) != ("v" in tensors):
        errors.append(("v" if "k" in tensors else "k", "missing: send k and v of new tokens together"))
    if "q" not in tensors:
        errors.append(("q", "missing"))
    if errors:
        raise ProblemError(errors)
    q = tensors["q"]
    if q.dtype not in layer.taken:
        raise ProblemError([("q", f"dtype {q.dtype} must be the cache's: {' or '.join(layer.taken)}")])
    count, length, ragged = _sizes(tensors, options.layout)
    if count != caches:
        raise ProblemError([("caches", f"{caches} caches for {count} sequences of q")])
    keys = _keys(tensors, options)
    given = dict(tensors)
    for name, dim in (("k", layer.head_dim), ("v", layer.value_dim)):
        heads = layer.kv_heads
        if name in given:
            shape = _shape(q.shape, options.layout, length, heads, dim)
            if given[name] != TensorInfo(q.dtype, shape):
                actual = f"{given[name].dtype} of {list(given[name].shape)}"
                errors.append((name, f"is {actual}, but q and the cache need {q.dtype} of {list(shape)}"))
        given[name] = TensorInfo(q.dtype, _shape(q.shape, options.layout, keys, heads, dim))
    if len(q.shape) < 4 and not ragged and layer.kv_heads != 1:
        errors.append(("q", f"has one head, but the cache has {layer.kv_heads} key/value heads"))
    if errors:
        raise ProblemError(errors)
    if ragged:
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
    return plan(given, options, "forward")


def key_weights_info(spec: Spec, keys: int) -> TensorInfo:
    """Return dtype and shape of the key weights of a call over caches, the longest of which has `keys` tokens.

    The shape is that over pages: (B,Hq,keys) in layout `thd`, too.
    """
    row, sizes = TENSORS["key_weights"], {**spec.sizes, "Sk": keys, "page_size": 1}
    return TensorInfo("float32", row.shape(sizes, spec.options.layout, spec.rank))


def _sizes(tensors: Mapping[str, TensorInfo], layout: str) -> tuple[int, int, bool]:
    """Return the number of sequences in q, the number of queries, and whether q is packed (layout `thd`).

    The number of queries is that of each sequence, or of all together if q is packed. Raises ProblemError.
    """
    q = tensors["q"].shape
    if layout == "thd":
        ends = tensors.get("cu_seqlens_q")
        if len(q) != 3 or ends is None or len(ends.shape) != 1 or not ends.shape[0]:
            raise ProblemError([("cu_seqlens_q", "is required in layout thd, with q of (T,H,D)")])
        return ends.shape[0] - 1, q[0], True
    if len(q) not in (2, 3, 4):
        raise ProblemError([("q", f"must have 2, 3 or 4 dimensions, not {len(q)}")])
    return (q[0] if len(q) > 2 else 1), q[-3 if layout == "bshd" and len(q) == 4 else -2], False


def _keys(tensors: Mapping[str, TensorInfo], options: Options) -> int:
    """Return the number of keys that the call's mask covers; _ANY_LENGTH without a mask."""
    mask, blocks = tensors.get("attn_mask"), tensors.get("block_mask")
    if mask is not None and mask.shape and mask.shape[-1] != 1:
        return mask.shape[-1]
    if blocks is not None and blocks.shape:
        return max((blocks.shape[-1] - 1) * options.block_size[1] + 1, 0)
    return _ANY_LENGTH


def _shape(q: Sequence[int], layout: str, length: int, heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of k or v with `length` tokens, in the layout and with the rank of a q of shape `q`."""
    if layout == "thd":
        return (length, heads, dim)
    if len(q) == 4:
        return (q[0], heads, length, dim) if layout == "bhsd" else (q[0], length, heads, dim)
    return (*q[:-2], length, dim)
