"""The keywords of the clients' calls. The docstring of a field documents that keyword in all calls.

`docs/docstrings.py` copies these docstrings into those of the calls. It takes the docstrings of `Problem`, `Scales` and
`Settled` from `flashpoint_kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from flashpoint._arrays import Array
from flashpoint.options import Backend, CausalAlignment, Grad, Layout, Precision
from flashpoint.shape_schema import Direction, Dtype, Shape
from flashpoint.verify_schema import Extra, VerifyProgress

if TYPE_CHECKING:
    from flashpoint._calls import HeldCache, SavedAttention


class Sending(TypedDict, total=False):
    """How a call is made."""

    timeout: float | None
    """Seconds for the whole call, retries included; the server knows it as the deadline. None waits without end.
    Default: the client's own.
    """
    priority: int
    """0 to 9; a higher priority runs sooner. Default: 0."""
    request_id: str
    """Name of the call in the server's log, printable ASCII. Default: the server makes one."""


class Settled(Sending, total=False):
    """How a call is made, and the options that every attention call has, except for the seed of dropout."""

    layout: Layout
    """`bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default: "bhsd"."""
    causal: bool
    """Query i sees key j only if j <= i + offset. Default: False."""
    causal_alignment: CausalAlignment
    """Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq; `top_left`: 0. Each
    sequence's own lengths count. Default: "bottom_right".
    """
    window: tuple[int, int]
    """[left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no bound. Default:
    (-1, -1).
    """
    block_size: tuple[int, int]
    """(Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128)."""
    scale: float | None
    """Factor of q·k. None, the default, is 1/sqrt(D)."""
    softcap: float
    """Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off. Default: 0.0."""
    dropout_p: float
    """Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0."""
    precision: Precision
    """float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee"."""
    deterministic: bool
    """Gradients are bitwise equal from run to run. Default: True."""
    backend: Backend
    """`auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never replaced by
    another. Default: "auto".
    """


class Problem(Settled, total=False):
    """Tensors and options of an attention problem. Tensors are numpy arrays or torch tensors."""

    attn_mask: Array | None
    """Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled scores). Not in layout
    `thd`.
    """
    block_mask: Array | None
    """Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that are false are
    skipped. Blocks count from each sequence's first row. Not in layout `thd`. `flashpoint_kernels.create_block_mask`
    makes one.
    """
    alibi_slopes: Array | None
    """Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query i and key j (ALiBi,
    Press et al. 2022). Not differentiable.
    """
    sinks: Array | None
    """Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss)."""
    q_lengths: Array | Sequence[int] | None
    """Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read; their o is 0 and
    their lse −∞. Not in layout `thd`.
    """
    kv_lengths: Array | Sequence[int] | None
    """Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read. Not in layout
    `thd`.
    """
    cu_seqlens_q: Array | Sequence[int] | None
    """Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,)."""
    cu_seqlens_k: Array | Sequence[int] | None
    """Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,)."""
    dropout_seed: int | None
    """Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever the backend
    (Philox, Salmon et al. 2011). None, the default, draws a seed.
    """


class Scales(TypedDict, total=False):
    """The scales of 8-bit k and v."""

    k_scale: Array | float | None
    """Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or one of k's shape
    without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
    """
    v_scale: Array | float | None
    """Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`."""


class WithMeta(TypedDict, total=False):
    """A keyword that changes the type of the result."""

    with_meta: bool
    """Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False."""


class Returned(WithMeta, total=False):
    """Keywords of a forward that change the type of the result."""

    return_lse: bool
    """Return (o, lse) in place of o. Default: False."""


class Forward(Returned, Problem, Scales, total=False):
    """Keywords of a forward without caches."""


class Layer(Problem, Scales, total=False):
    """Keywords of a cache's `attention` that do not change the type of its result."""

    layer: int
    """Layer of the caches, from 0. Default: 0."""


class Layers(Layer, total=False):
    """Keywords of `Client.attention` that do not change the type of its result."""

    caches: Sequence[HeldCache | str] | None
    """KV caches that hold the keys and values, one for each sequence of q: objects of `Client.cache`, or ids. All are
    on one engine (`Client.caches`, or `beside`). Default: none; k and v are all keys and values.
    """
    at: Sequence[int] | None
    """With `caches`: positions, one for each sequence, where k and v are written. Later tokens of the layer are
    dropped. Default: the end of each cache.
    """


class OfLayer(Returned, Layer, total=False):
    """Keywords of a cache's `attention`."""


class OverCaches(Returned, Layers, total=False):
    """Keywords of `Client.attention`."""

    save: bool
    """Let the server keep the inputs, o and lse for `attention_grad`: the result is a `SavedAttention`. Not with
    `caches`. Default: False.
    """


class OfForward(TypedDict, total=False):
    """The results of the forward, and the gradients to return."""

    o: Array | None
    """Output of the forward, (B, Hq, Sq, Dv). With o and lse the server does not run the forward again."""
    lse: Array | None
    """Log-sum-exp of the forward, float32 (B, Hq, Sq); (Hq, Tq) in layout `thd`."""
    dlse: Array | None
    """Gradient of lse, of its shape, float32. Default: none, which is 0."""
    grads: Sequence[Grad]
    """Gradients to return, in this order: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and `dsinks`.
    Default: ("dq", "dk", "dv").
    """


class OfHeld(TypedDict, total=False):
    """A forward that the server holds."""

    saved: SavedAttention | str | None
    """Result of `attention` with `save=True`, or its id. It takes the place of q, k, v, o, lse and the options: only
    `do`, `dlse`, `grads`, `deterministic`, `backend` and keywords of the call itself are taken beside it.
    """


class Gradients(OfForward, OfHeld, Problem, total=False):
    """Keywords of `Client.attention_grad` that do not change the type of its result."""


class Backward(OfForward, WithMeta, Problem, total=False):
    """Keywords of a gradient whose forward the server does not hold."""


class OfSaved(OfHeld, Backward, total=False):
    """Keywords of `Client.attention_grad`."""


class CacheSizes(TypedDict, total=False):
    """Keywords of `Client.cache`. A size is one number for all layers, or a sequence with one for each layer."""

    layers: int
    """Number of layers. Default: 1."""
    kv_heads: int | Sequence[int]
    """Key/value heads, Hk. Default: 8."""
    head_dim: int | Sequence[int]
    """Columns of q and k, D. Default: 64."""
    value_dim: int | Sequence[int] | None
    """Columns of v, Dv. Default: None, as `head_dim`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: the dtype of q, k and v. Or `float8_e4m3fn` or `int8`: the cache stores
    8 bits and a scale for each token and head; q, k and v are in any of the other three. Default: "float32".
    """
    max_length: int | None
    """Largest number of tokens; their memory is reserved now. Default: None, memory grows with the tokens."""
    keep: int | Sequence[int | None] | None
    """Tokens at the end of a layer that stay; the server may free earlier ones (sliding windows). Default: None, all.
    """
    ttl_s: float | None
    """Time to live in seconds since the last use. Default: None, the server's own (600)."""
    beside: HeldCache | str | None
    """A cache, or its id, on whose engine this one is made, as a call over both needs. Default: None, any engine."""


class SpreadSizes(TypedDict, total=False):
    """Keywords of `flashpoint.sharded.cache`: those of `CacheSizes` that hold for several servers, and `span`."""

    layers: int
    """Number of layers. Default: 1."""
    kv_heads: int | Sequence[int]
    """Key/value heads, Hk: one number for all layers, or one for each. Default: 8."""
    head_dim: int | Sequence[int]
    """Columns of q and k, D. Default: 64."""
    value_dim: int | Sequence[int] | None
    """Columns of v, Dv. Default: None, as `head_dim`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`, as q, k and v; or `float8_e4m3fn` or `int8`, with scales. Default: "float32".
    """
    ttl_s: float | None
    """Time to live in seconds since the last use. Default: None, the servers' own (600)."""
    span: int
    """Consecutive tokens that one server holds before the next server takes over. Default: 65536."""


class Verify(Problem, Scales, total=False):
    """Keywords of `Client.verify`."""

    shape: Shape | Mapping[str, int]
    """Sizes of a problem that the server draws: `batch`, `q_heads`, `kv_heads`, `q_len`, `kv_len`, `head_dim`,
    `value_dim`. `q_len` and `head_dim` are needed. Not beside tensors.
    """
    dtype: Dtype
    """Dtype of the drawn q, k, v and do. Default: "float32"."""
    seed: int
    """Seed of the drawn tensors, 0 to 2^63 − 1. Default: 0."""
    direction: Direction
    """Judge o and lse (`forward`), the gradients (`backward`), or `both`. Default: "both"."""
    extras: Sequence[Extra]
    """Optional inputs that are drawn too: some of `bool_mask`, `float_mask`, `block_mask`, `alibi_slopes`, `sinks`,
    `q_lengths`, `kv_lengths`. Default: none.
    """
    grads: Sequence[Grad]
    """Gradients to judge: some of `dq`, `dk`, `dv`, `dattn_mask` and `dsinks`. Default: ("dq", "dk", "dv")."""
    progress: Callable[[VerifyProgress], object] | None
    """Called with each `VerifyProgress` that the server sends: some a second, the first when the verification begins.
    An exception that it raises ends the call and the verification. Default: None.
    """
    do: Array | None
    """Gradient of o, (B, Hq, Sq, Dv): judge the gradients too. Default: None."""
    dlse: Array | None
    """Gradient of lse, (B, Hq, Sq) float32. Default: None, which is 0."""
    o: Array | None
    """Your own output, (B, Hq, Sq, Dv): it is judged, and no backend runs. So are the six tensors that follow."""
    lse: Array | None
    """Your own log-sum-exp, (B, Hq, Sq)."""
    dq: Array | None
    """Your own gradient of q, of its shape."""
    dk: Array | None
    """Your own gradient of k, of its shape."""
    dv: Array | None
    """Your own gradient of v, of its shape."""
    dattn_mask: Array | None
    """Your own gradient of a float `attn_mask`, of its shape."""
    dsinks: Array | None
    """Your own gradient of `sinks`, of its shape."""


class Benchmark(Sending, total=False):
    """Keywords of `Client.benchmark`: every shape in every dtype, mask and direction on every backend is a case."""

    preset: str | None
    """Named grid, in place of one of your own: `papers` or `h100`. Default: None."""
    shapes: Sequence[Shape | Mapping[str, int]]
    """Sizes to time, each as the `shape` of `verify`."""
    dtypes: Sequence[Dtype]
    """Dtypes to time: some of `float32`, `float16` and `bfloat16`. Default: ("float32",)."""
    causal: Sequence[bool]
    """Time without the causal mask, with it, or both. Default: (False,)."""
    directions: Sequence[Direction]
    """`forward`; `backward`, from saved o and lse; `both`, as in training. Default: ("forward",)."""
    backends: Sequence[str]
    """Implementations to time, in this order. Default: all that the device supports."""
    relative_precision: float
    """Repeat until the 95% confidence interval of the median is this part of it. Default: 0.01."""
    max_seconds: float
    """Largest time in seconds that one case is repeated. Default: 3."""
    warmup_ms: float
    """Warm-up of each case in milliseconds. Default: 50."""


class ShardedForward(Forward, total=False):
    """Keywords of `flashpoint.sharded.attention`."""

    parts: tuple[int, int] | None
    """(r, c): cut every sequence's queries into r parts and its keys into c. Parts beyond the number of clients wait
    for the first that is free, so more parts need less memory of each server. Default: None, as many parts as clients,
    cut so that the fewest bytes are sent.
    """


class ShardedBackward(Backward, total=False):
    """Keywords of `flashpoint.sharded.attention_grad`."""

    parts: tuple[int, int] | None
    """(r, c): cut every sequence's queries into r parts and its keys into c, as in `attention`. Default: None."""


class TorchKeywords(Problem, Scales, total=False):
    """Keywords of `flashpoint.torch.attention` that do not change the type of its result."""

    save: bool
    """Let the server keep the forward until its backward has run: the backward then sends `do` alone. Where the server
    has no memory for it, or has lost it, the backward sends all. One client only. Default: False.
    """
    parts: tuple[int, int] | None
    """With a list of clients, (r, c): cut the queries into r parts and the keys into c. Default: None, as many parts as
    clients.
    """


class Saving(Returned, TorchKeywords, total=False):
    """Keywords of `flashpoint.torch.attention`."""
