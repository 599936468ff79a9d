"""Types of the clients' keyword arguments. `documented` adds their `Args:` to the docstrings of methods that take them.

`documented` is in `flashpoint_contract.wording.docstrings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import TypedDict  # before Python 3.12, typing.TypedDict does not store its bases

from flashpoint._calls.arrays import Array
from flashpoint_contract.options import Backend, CausalAlignment, Grad, Layout, Precision
from flashpoint_contract.schemas.shapes import Direction, Dtype, Shape
from flashpoint_contract.schemas.verify import Extra, VerifyProgress
from flashpoint_contract.wording.docstrings import documented

RAISES = "FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid."
call = partial(documented, raises=RAISES)  # decorator of the public functions and methods that send a request

if TYPE_CHECKING:
    from flashpoint._calls.service import HeldCache, SavedAttention


class Sending(TypedDict, total=False):
    """How a call is made.

    Args:
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits without
            end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log: up to 128 letters, digits and `._:/+=@~-`. Default: the server
            makes one.
    """

    timeout: float | None
    priority: int
    request_id: str


class Settled(Sending, total=False):
    """How a call is made, and the options that every attention call has, except for the seed of dropout."""

    layout: Layout
    causal: bool
    causal_alignment: CausalAlignment
    window: tuple[int, int] | None
    block_size: tuple[int, int]
    scale: float | None
    softcap: float
    dropout_p: float
    precision: Precision
    deterministic: bool
    backend: Backend


class Problem(Settled, total=False):
    """Tensors and options of an attention problem. Tensors are numpy arrays or torch tensors."""

    attn_mask: Array | None
    block_mask: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    q_lengths: Array | Sequence[int] | None
    kv_lengths: Array | Sequence[int] | None
    offset: Array | Sequence[int] | int | None
    cu_seqlens_q: Array | Sequence[int] | None
    cu_seqlens_k: Array | Sequence[int] | None
    dropout_seed: int | None


class Scales(TypedDict, total=False):
    """The scales of 8-bit k and v."""

    k_scale: Array | float | None
    v_scale: Array | float | None


class WithMeta(TypedDict, total=False):
    """A keyword that changes the type of the result.

    Args:
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
    """

    with_meta: bool


class Returned(WithMeta, total=False):
    """Keywords of a forward that change the type of the result.

    Args:
        return_lse: Return (o, lse) in place of o. Default: False.
        return_key_weights: Also return key_weights, last: the sum over the queries of each key's probability, before
            dropout, float32 (B, Hq, Sk). It has no gradient. Default: False.
    """

    return_lse: bool
    return_key_weights: bool


class Forward(Returned, Problem, Scales, total=False):
    """Keywords of a forward without caches."""


class Layer(Problem, Scales, total=False):
    """Keywords of a cache's `attention` that do not change the type of its result.

    Args:
        layer: Layer of the caches, from 0. Default: 0.
    """

    layer: int


class Layers(Layer, total=False):
    """Keywords of `Client.attention` that do not change the type of its result.

    Args:
        caches: KV caches that hold the keys and values, one for each sequence of q: objects of `Client.cache`, or ids.
            All must be on one engine: made by `Client.caches`, or with `beside`. Default: none; k and v are all keys
            and values.
        at: With `caches`: positions, one for each sequence, where k and v are written. Later tokens of the layer are
            dropped. Default: the end of each cache.
    """

    caches: Sequence[HeldCache | str] | None
    at: Sequence[int] | None


class OfLayer(Returned, Layer, total=False):
    """Keywords of a cache's `attention`."""


class OverCaches(Returned, Layers, total=False):
    """Keywords of `Client.attention`.

    Args:
        save: Let the server keep the inputs, o and lse for `attention_grad`: the result is a `SavedAttention`. Not with
            `caches`. Default: False.
    """

    save: bool


class OfForward(TypedDict, total=False):
    """The results of the forward, and the gradients to return.

    Args:
        o: Output of the forward, (B, Hq, Sq, Dv). With o and lse the server does not run the forward again.
        lse: Log-sum-exp of the forward, float32 (B, Hq, Sq); (Hq, Tq) in layout `thd`.
        dlse: Gradient of lse, of its shape, float32. Default: none, which is 0.
        grads: Gradients to return, in this order: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and
            `dsinks`. Default: ("dq", "dk", "dv").
    """

    o: Array | None
    lse: Array | None
    dlse: Array | None
    grads: Sequence[Grad]


class OfHeld(TypedDict, total=False):
    """A forward that the server holds.

    Args:
        saved: Result of `attention` with `save=True`, or its id. It takes the place of q, k, v, o, lse and the options:
            only `do`, `dlse`, `grads`, `deterministic`, `backend` and keywords of the call itself are taken beside it.
    """

    saved: SavedAttention | str | None


class Gradients(OfForward, OfHeld, Problem, total=False):
    """Keywords of `Client.attention_grad` that do not change the type of its result."""


class Backward(OfForward, WithMeta, Problem, total=False):
    """Keywords of a gradient whose forward the server does not hold."""


class OfSaved(OfHeld, Backward, total=False):
    """Keywords of `Client.attention_grad`."""


class Sizes(TypedDict, total=False):
    """The sizes of a cache, and its time to live.

    Args:
        layers: Number of layers. Default: 1.
        kv_heads: Key/value heads, Hk. Default: 8.
        head_dim: Columns of q and k, D. Default: 64.
        value_dim: Columns of v, Dv. Default: None, as `head_dim`.
        dtype: `float32`, `bfloat16` or `float16`: the dtype of q, k and v. Or `float8_e4m3fn` or `int8`: the cache
            stores 8-bit values, and a scale for each token and head; q, k and v are in any of the other three dtypes.
            Default: "float32".
        ttl_s: Time to live in seconds since the last use. Default: None, the server's own (600).
    """

    layers: int
    kv_heads: int | Sequence[int]
    head_dim: int | Sequence[int]
    value_dim: int | Sequence[int] | None
    dtype: str
    ttl_s: float | None


class CacheSizes(Sizes, total=False):
    """Keywords of `Client.cache`. A size is one number for all layers, or a sequence with one for each layer.

    Args:
        max_length: Largest number of tokens; their memory is reserved now. Default: None, memory grows with the tokens.
        keep: Number of latest tokens of a layer to keep; the server may free earlier ones (for sliding windows).
            Default: None, all.
        beside: A cache, or its id. The new cache is made on its engine, so that one call can use both. Default: None,
            any engine.
    """

    max_length: int | None
    keep: int | Sequence[int | None] | None
    beside: HeldCache | str | None


class SpreadSizes(Sizes, total=False):
    """Keywords of `flashpoint.sharded.cache`. A size is one number for all layers, or a sequence with one for each.

    Args:
        span: Consecutive tokens that one server holds before the next server takes over. Default: 65536.
    """

    span: int


class Verify(Problem, Scales, total=False):
    """Keywords of `Client.verify`.

    Args:
        shape: Sizes of a problem that the server draws: `batch`, `q_heads`, `kv_heads`, `q_len`, `kv_len`, `head_dim`,
            `value_dim`. `q_len` and `head_dim` are needed. Not beside tensors.
        dtype: Dtype of the drawn q, k, v and do. Default: "float32".
        seed: Seed of the drawn tensors, 0 to 2^63 − 1. Default: 0.
        direction: Judge o and lse (`forward`), the gradients (`backward`), or `both`. Default: "both".
        extras: Optional inputs that are drawn too: some of `bool_mask`, `float_mask`, `block_mask`, `alibi_slopes`,
            `sinks`, `q_lengths`, `kv_lengths`, `offset`. Default: none.
        grads: Gradients to judge: some of `dq`, `dk`, `dv`, `dattn_mask` and `dsinks`. Default: ("dq", "dk", "dv").
        progress: Function that is called with each `VerifyProgress` that the server sends: the first when the
            verification begins, then several a second. If it raises an exception, the call and the verification end.
            Default: None.
        do: Gradient of o, (B, Hq, Sq, Dv): judge the gradients too. Default: None.
        dlse: Gradient of lse, (B, Hq, Sq) float32. Default: None, which is 0.
        o: Your own output, (B, Hq, Sq, Dv): it is judged, and no backend runs. The same holds for the next six tensors.
        lse: Your own log-sum-exp, (B, Hq, Sq).
        dq: Your own gradient of q, of its shape.
        dk: Your own gradient of k, of its shape.
        dv: Your own gradient of v, of its shape.
        dattn_mask: Your own gradient of a float `attn_mask`, of its shape.
        dsinks: Your own gradient of `sinks`, of its shape.
    """

    shape: Shape | Mapping[str, int]
    dtype: Dtype
    seed: int
    direction: Direction
    extras: Sequence[Extra]
    grads: Sequence[Grad]
    progress: Callable[[VerifyProgress], object] | None
    do: Array | None
    dlse: Array | None
    o: Array | None
    lse: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None
    dattn_mask: Array | None
    dsinks: Array | None


class Benchmark(Sending, total=False):
    """Keywords of `Client.benchmark`: every shape in every dtype, mask and direction on every backend is a case.

    Args:
        preset: Named grid, in place of one of your own: `papers` or `h100`. Default: None.
        shapes: Sizes to time, each as the `shape` of `verify`.
        dtypes: Dtypes to time: some of `float32`, `float16` and `bfloat16`. Default: ("float32",).
        causal: Time without the causal mask, with it, or both. Default: (False,).
        directions: `forward`; `backward`, from saved o and lse; `both`, as in training. Default: ("forward",).
        backends: Implementations to time, in this order. Default: all that the device supports.
        relative_precision: Repeat until the 95% confidence interval of the median is this part of it. Default: 0.01.
        max_seconds: Largest time in seconds that one case is repeated. Default: 3.
        warmup_ms: Warm-up of each case in milliseconds. Default: 50.
    """

    preset: str | None
    shapes: Sequence[Shape | Mapping[str, int]]
    dtypes: Sequence[Dtype]
    causal: Sequence[bool]
    directions: Sequence[Direction]
    backends: Sequence[str]
    relative_precision: float
    max_seconds: float
    warmup_ms: float


class Parts(TypedDict, total=False):
    """How a sharded call is cut.

    Args:
        parts: (r, c): cut every sequence's queries into r parts and its keys into c. With more parts than clients, each
            server needs less memory. Default: None, as many parts as clients, cut so that the fewest bytes are sent.
    """

    parts: tuple[int, int] | None


class ShardedForward(Forward, Parts, total=False):
    """Keywords of `flashpoint.sharded.attention`."""


class ShardedBackward(Backward, Parts, total=False):
    """Keywords of `flashpoint.sharded.attention_grad`."""


class TorchKeywords(Problem, Scales, total=False):
    """Keywords of `flashpoint.torch.attention` that do not change the type of its result.

    Args:
        save: Let the server keep the forward until its backward has run: the backward then sends `do` alone. If the
            server has no memory for the forward, or has lost it, the backward sends all tensors. Not with a list of
            clients. Default: False.
        parts: With a list of clients, (r, c): cut the queries into r parts and the keys into c. Default: None, as many
            parts as clients.
    """

    save: bool
    parts: tuple[int, int] | None


class Saving(Returned, TorchKeywords, total=False):
    """Keywords of `flashpoint.torch.attention`."""
