"""Compute one attention on several servers, for sequences that are too long or too slow on one device.

    clients = [flashpoint.Client(url) for url in urls]
    o = flashpoint.sharded.attention(clients, q, k, v, causal=True)
    dq, dk, dv = flashpoint.sharded.attention_grad(clients, do, q, k, v, causal=True)

Queries and keys are cut into pieces of nearly equal work, one for each server. The answers are merged exactly, by their
log-sum-exp. If a server is full, stopping or gone, its piece goes to another server. If a server has not answered after
half of the timeout, another server gets the same piece too. The call returns the whole answer or raises an error. An
error, a deadline or a cancellation ends all pieces. `flashpoint.torch.attention` also takes a list of clients.

A KV cache over several servers, for a context that does not fit into one server:

    with flashpoint.sharded.cache(clients, layers=12, kv_heads=8, head_dim=64) as cache:
        o = cache.attention(q, k, v, layer=0, causal=True)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

from flashpoint import _calls
from flashpoint._arrays import Array
from flashpoint._async_client import AsyncClient
from flashpoint._client import Client, _seconds
from flashpoint._keywords import ShardedBackward, ShardedForward, SpreadSizes
from flashpoint._shards import merge
from flashpoint._shards.caches import AsyncShardedCache, ShardedCache
from flashpoint._shards.plan import plan
from flashpoint._shards.problem import problem
from flashpoint._shards.rounds import Tasks, Threads
from flashpoint._shards.run import run, run_async
from flashpoint._shards.spread import Part, Spread
from flashpoint._shards.work import Item, Work
from flashpoint.errors import invalid
from flashpoint.options import AttentionOptions
from flashpoint_contract.tensors import INPUT_TENSORS

__all__ = [
    "AsyncShardedCache", "Part", "ShardedCache", "async_attention", "async_attention_grad", "async_cache", "attention",
    "attention_grad", "cache",
]  # fmt: skip


def attention(clients: Sequence[Client], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]) -> Any:
    """Return attention as `Client.attention` does, computed by the servers of all `clients`.

    The shapes, dtypes, options and answers are the same. Dropout and block masks are refused, because they count
    positions in the whole sequence. If q is float16 or bfloat16, each part's o is, too: send float32 to round once
    instead of twice. float64 is merged with lse in float32, and its keys are cut only if `parts` says so.

    Args:
        clients: Clients of the servers, one or more. Without `timeout` the first client's own holds for the whole
            call.
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).

    Keyword Args:
        parts: (r, c): cut every sequence's queries into r parts and its keys into c. Parts beyond the number of
            clients wait for the first that is free, so more parts need less memory of each server. Default: None,
            as many parts as clients, cut so that the fewest bytes are sent.
        return_lse: Return (o, lse) in place of o. Default: False.
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled
            scores). Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that
            are false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query
            i and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read.
            Not in layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
            without end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.
        k_scale: Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or
            one of k's shape without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
        v_scale: Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`.

    Returns:
        As `Client.attention`: o (B, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).

    Raises:
        FlashpointError: InvalidInputError, or an error of a server that no other server could make good.
    """
    return _drive(_Job(clients, Client, "/attention", {"q": q, "k": k, "v": v, **keywords}))


def attention_grad(
    clients: Sequence[Client], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """Return the gradients of `attention` as `Client.attention_grad` does, computed by the servers of all `clients`.

    Each server gets the o and lse of the whole, which are computed first where they are not given.

    Args:
        clients: Clients of the servers, one or more. Without `timeout` the first client's own holds for the whole
            call.
        do: Gradient of o, (B, Hq, Sq, Dv).
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).

    Keyword Args:
        parts: (r, c): cut every sequence's queries into r parts and its keys into c, as in `attention`. Default:
            None.
        o: Output of the forward, (B, Hq, Sq, Dv). With o and lse the server does not run the forward again.
        lse: Log-sum-exp of the forward, float32 (B, Hq, Sq); (Hq, Tq) in layout `thd`.
        dlse: Gradient of lse, of its shape, float32. Default: none, which is 0.
        grads: Gradients to return, in this order: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and
            `dsinks`. Default: ("dq", "dk", "dv").
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled
            scores). Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that
            are false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query
            i and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read.
            Not in layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
            without end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.

    Returns:
        (dq, dk, dv), or one tensor for each name in `grads`, in that order. With `with_meta` (that, list of `Part`).

    Raises:
        FlashpointError: InvalidInputError, or an error of a server that no other server could make good.
    """
    return _drive(_Job(clients, Client, "/attention/grad", {"do": do, "q": q, "k": k, "v": v, **keywords}))


async def async_attention(
    clients: Sequence[AsyncClient], q: Array, k: Array, v: Array, **keywords: Unpack[ShardedForward]
) -> Any:
    """Return attention as `Client.attention` does, computed by the servers of all `clients`.

    The shapes, dtypes, options and answers are the same. Dropout and block masks are refused, because they count
    positions in the whole sequence. If q is float16 or bfloat16, each part's o is, too: send float32 to round once
    instead of twice. float64 is merged with lse in float32, and its keys are cut only if `parts` says so.

    Args:
        clients: Clients of the servers, one or more. Without `timeout` the first client's own holds for the whole
            call.
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).

    Keyword Args:
        parts: (r, c): cut every sequence's queries into r parts and its keys into c. Parts beyond the number of
            clients wait for the first that is free, so more parts need less memory of each server. Default: None,
            as many parts as clients, cut so that the fewest bytes are sent.
        return_lse: Return (o, lse) in place of o. Default: False.
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled
            scores). Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that
            are false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query
            i and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read.
            Not in layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
            without end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.
        k_scale: Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or
            one of k's shape without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
        v_scale: Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`.

    Returns:
        As `Client.attention`: o (B, Hq, Sq, Dv), or (o, lse). With `with_meta` (that, list of `Part`).

    Raises:
        FlashpointError: InvalidInputError, or an error of a server that no other server could make good.
    """
    return await _drive_async(_Job(clients, AsyncClient, "/attention", {"q": q, "k": k, "v": v, **keywords}))


async def async_attention_grad(
    clients: Sequence[AsyncClient], do: Array, q: Array, k: Array, v: Array, **keywords: Unpack[ShardedBackward]
) -> Any:
    """Return the gradients of `attention` as `Client.attention_grad` does, computed by the servers of all `clients`.

    Each server gets the o and lse of the whole, which are computed first where they are not given.

    Args:
        clients: Clients of the servers, one or more. Without `timeout` the first client's own holds for the whole
            call.
        do: Gradient of o, (B, Hq, Sq, Dv).
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).

    Keyword Args:
        parts: (r, c): cut every sequence's queries into r parts and its keys into c, as in `attention`. Default:
            None.
        o: Output of the forward, (B, Hq, Sq, Dv). With o and lse the server does not run the forward again.
        lse: Log-sum-exp of the forward, float32 (B, Hq, Sq); (Hq, Tq) in layout `thd`.
        dlse: Gradient of lse, of its shape, float32. Default: none, which is 0.
        grads: Gradients to return, in this order: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and
            `dsinks`. Default: ("dq", "dk", "dv").
        with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled
            scores). Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that
            are false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query
            i and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read.
            Not in layout `thd`.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`. `bottom_right`: Sk − Sq;
            `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
        timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
            without end. Default: the client's own.
        priority: 0 to 9; a higher priority runs sooner. Default: 0.
        request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.

    Returns:
        (dq, dk, dv), or one tensor for each name in `grads`, in that order. With `with_meta` (that, list of `Part`).

    Raises:
        FlashpointError: InvalidInputError, or an error of a server that no other server could make good.
    """
    tensors = {"do": do, "q": q, "k": k, "v": v}
    return await _drive_async(_Job(clients, AsyncClient, "/attention/grad", {**tensors, **keywords}))


def cache(clients: Sequence[Client], **shape: Unpack[SpreadSizes]) -> ShardedCache:
    """Make a KV cache of one sequence, whose tokens are spread over the servers of all `clients`.

    Tokens [p·span, (p + 1)·span) are on server p modulo the number of servers, in a cache of its own that is made when
    the first of them is written. Each server reads its own tokens; the answers are merged by their log-sum-exp.

    Args:
        clients: Clients of the servers, one or more.

    Keyword Args:
        layers: Number of layers. Default: 1.
        kv_heads: Key/value heads, Hk: one number for all layers, or one for each. Default: 8.
        head_dim: Columns of q and k, D. Default: 64.
        value_dim: Columns of v, Dv. Default: None, as `head_dim`.
        dtype: `float32`, `bfloat16` or `float16`, as q, k and v; or `float8_e4m3fn` or `int8`, with scales.
            Default: "float32".
        ttl_s: Time to live in seconds since the last use. Default: None, the servers' own (600).
        span: Consecutive tokens that one server holds before the next server takes over. Default: 65536.

    Returns:
        The cache, empty. At the end of a `with` it is deleted.

    Raises:
        FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
    """
    spread = Spread([client.url for client in _checked(clients, Client)], shape)
    threads = Threads(clients)
    threads.run(spread.grow(0))
    return ShardedCache(spread, threads)


async def async_cache(clients: Sequence[AsyncClient], **shape: Unpack[SpreadSizes]) -> AsyncShardedCache:
    """Make a KV cache of one sequence, whose tokens are spread over the servers of all `clients`.

    Tokens [p·span, (p + 1)·span) are on server p modulo the number of servers, in a cache of its own that is made when
    the first of them is written. Each server reads its own tokens; the answers are merged by their log-sum-exp.

    Args:
        clients: Clients of the servers, one or more.

    Keyword Args:
        layers: Number of layers. Default: 1.
        kv_heads: Key/value heads, Hk: one number for all layers, or one for each. Default: 8.
        head_dim: Columns of q and k, D. Default: 64.
        value_dim: Columns of v, Dv. Default: None, as `head_dim`.
        dtype: `float32`, `bfloat16` or `float16`, as q, k and v; or `float8_e4m3fn` or `int8`, with scales.
            Default: "float32".
        ttl_s: Time to live in seconds since the last use. Default: None, the servers' own (600).
        span: Consecutive tokens that one server holds before the next server takes over. Default: 65536.

    Returns:
        The cache, empty. At the end of a `with` it is deleted.

    Raises:
        FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
    """
    spread = Spread([client.url for client in _checked(clients, AsyncClient)], shape)
    tasks = Tasks(clients)
    await tasks.run(spread.grow(0))
    return AsyncShardedCache(spread, tasks)


def _checked(clients: Any, kind: type) -> Any:
    if not isinstance(clients, Sequence) or not clients or not all(isinstance(c, kind) for c in clients):
        raise invalid("clients", f"must be a list of {kind.__name__}, one or more")
    return clients


def _drive(job: _Job) -> Any:
    for work in job.rounds():
        run(work, job.clients, job.sending)
    return job.result()


async def _drive_async(job: _Job) -> Any:
    for work in job.rounds():
        await run_async(work, job.clients, job.sending)
    return job.result()


class _Job:
    """One call of this module, as rounds of work for the servers, one after another."""

    def __init__(self, clients: Any, kind: type, path: str, keywords: dict[str, Any]) -> None:
        self.clients = _checked(clients, kind)
        forward = path == "/attention"
        _calls._refuse(keywords, _calls._BACKWARD_ONLY if forward else _calls._FORWARD_ONLY)
        timeout = keywords.pop("timeout", _calls.DEFAULT)
        timeout = clients[0]._timeout if timeout is _calls.DEFAULT else _seconds(timeout)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._with_meta = keywords.pop("with_meta", False)
        parts = keywords.pop("parts", None)
        self.sending: dict[str, Any] = {
            name: keywords.pop(name) for name in ("priority", "request_id") if name in keywords
        }
        given = {name: keywords.pop(name, None) for name in INPUT_TENSORS}
        options = _calls.checked(AttentionOptions, keywords)
        self._problem = problem(given, options, "forward" if forward else "backward")
        self._steps = (merge.forward if forward else merge.backward)(
            self._problem, plan(self._problem, len(clients), parts)
        )
        self._names = options.grads if not forward else ("o", "lse") if options.return_lse else ("o",)
        self._parts: list[Part] = []
        self._found: dict[str, Any] = {}

    def rounds(self) -> Iterator[Work]:
        """Yield the work of each round. The previous round must be done before the next one is asked for."""
        retries = max(client._retries for client in self.clients)
        try:
            questions = next(self._steps)
            while True:
                work = Work(questions, len(self.clients), retries, self._deadline)
                yield work
                self._parts += [self._part(item) for item in work.items]
                questions = self._steps.send([item.question.answers(item.answer[0]) for item in work.items])
        except StopIteration as end:
            self._found = end.value

    def result(self) -> Any:
        answer = tuple(self._problem.answer(name, self._found[name]) for name in self._names)
        result = answer[0] if self._names == ("o",) else answer
        return (result, self._parts) if self._with_meta else result

    def _part(self, item: Item) -> Part:
        shard, meta = item.question.shard, replace(item.answer[1], retries=item.failures)
        queries, keys = ((at.start, at.stop) for at in (shard.queries, shard.keys))
        return Part(self.clients[item.server].url, item.question.path, queries, keys, shard.pairs, meta)
