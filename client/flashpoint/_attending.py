"""`attention` and `attention_grad` of both clients, with the type of the result for each way to call them.

The results have the type of q, `A`: numpy arrays give numpy arrays, torch tensors give torch tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from numpy.typing import NDArray

from flashpoint import _calls
from flashpoint._arrays import Array
from flashpoint._calls import Call, SavedAttention
from flashpoint._keywords import Gradients, Layers, OfSaved, OverCaches
from flashpoint.meta import Meta

if TYPE_CHECKING:
    import torch

A = TypeVar("A", NDArray[Any], "torch.Tensor")


class Attending:
    """The methods `attention` and `attention_grad` of `Client`."""

    if TYPE_CHECKING:

        def _call(self, call: Call, /) -> Any: ...

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> A: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> tuple[A, A]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[A, Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[tuple[A, A], Meta]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *,
        save: Literal[True], return_lse: bool = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> SavedAttention: ...  # fmt: skip

    @overload
    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any: ...

    def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any:
        """Return attention, softmax(scale·q·kᵀ + mask)·v (FlashAttention-2, Dao 2023), computed by the server.

        B is the batch, Sq and Sk are the numbers of queries and keys, Hq and Hk the heads of q and of k and v, D and Dv
        the columns of q and k, and of v. numpy arrays give numpy arrays; torch tensors give torch tensors on q's
        device, without autograd (`flashpoint.torch.attention` has gradients).

        Args:
            q: Queries, (B, Hq, Sq, D) in layout `bhsd`; (B, S, D) and (S, D) are one head. float16, bfloat16, float32
                or float64.
            k: Keys, (B, Hk, Sk, D), of q's rank; Hq is a multiple of Hk. q's dtype; or float8_e4m3fn or int8, with
                `k_scale`. With `caches`: the keys of new tokens, which are written first; None only reads.
            v: Values, (B, Hk, Sk, Dv), likewise.

        Keyword Args:
            save: Let the server keep the inputs, o and lse for `attention_grad`: the result is a `SavedAttention`. Not
                with `caches`. Default: False.
            return_lse: Return (o, lse) in place of o. Default: False.
            with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
            caches: KV caches that hold the keys and values, one for each sequence of q: objects of `Client.cache`, or
                ids. All are on one engine (`Client.caches`, or `beside`). Default: none; k and v are all keys and
                values.
            at: With `caches`: positions, one for each sequence, where k and v are written. Later tokens of the layer
                are dropped. Default: the end of each cache.
            layer: Layer of the caches, from 0. Default: 0.
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
            o (B, Hq, Sq, Dv), in q's dtype, layout and rank. With `return_lse` (o, lse), lse float32 (B, Hq, Sq), the
            natural logarithm of the softmax's denominator. With `with_meta` (result, `Meta`). With `save` a
            `SavedAttention`. A query that sees no key has o = 0 and lse = −∞.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return self._call(_calls.forward(q, k, v, keywords))

    @overload
    def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[False] = False, **keywords: Unpack[Gradients],
    ) -> tuple[A, ...]: ...  # fmt: skip

    @overload
    def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[True], **keywords: Unpack[Gradients],
    ) -> tuple[tuple[A, ...], Meta]: ...  # fmt: skip

    @overload
    def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any: ...  # fmt: skip

    def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any:  # fmt: skip
        """Return the gradients of `attention` for `do`, the gradient of its o.

        The algorithm is FlashAttention-2's (Dao 2023, Algorithm 2). Options and other tensors are those of the forward;
        with dropout `dropout_seed` is needed.

        Args:
            do: Gradient of o, (B, Hq, Sq, Dv), q's dtype.
            q: Queries, as `attention` took them. None beside `saved`.
            k: Keys, as `attention` took them. None beside `saved`.
            v: Values, as `attention` took them. None beside `saved`.

        Keyword Args:
            saved: Result of `attention` with `save=True`, or its id. It takes the place of q, k, v, o, lse and the
                options: only `do`, `dlse`, `grads`, `deterministic`, `backend` and keywords of the call itself are
                taken beside it.
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
            (dq, dk, dv), or one tensor for each name in `grads`, in that order, of the shape and dtype of its input.
            With `with_meta` (that, `Meta`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return self._call(_calls.backward(do, q, k, v, keywords))


class AsyncAttending:
    """The methods `attention` and `attention_grad` of `AsyncClient`."""

    if TYPE_CHECKING:

        async def _call(self, call: Call, /) -> Any: ...

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> A: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> tuple[A, A]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[False] = False, with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[A, Meta]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: A, k: A | None = None, v: A | None = None, *,
        return_lse: Literal[True], with_meta: Literal[True], **keywords: Unpack[Layers],
    ) -> tuple[tuple[A, A], Meta]: ...  # fmt: skip

    @overload
    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, *,
        save: Literal[True], return_lse: bool = False, with_meta: Literal[False] = False, **keywords: Unpack[Layers],
    ) -> SavedAttention: ...  # fmt: skip

    @overload
    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any: ...

    async def attention(
        self, q: Array, k: Array | None = None, v: Array | None = None, **keywords: Unpack[OverCaches]
    ) -> Any:
        """Return attention, softmax(scale·q·kᵀ + mask)·v (FlashAttention-2, Dao 2023), computed by the server.

        B is the batch, Sq and Sk are the numbers of queries and keys, Hq and Hk the heads of q and of k and v, D and Dv
        the columns of q and k, and of v. numpy arrays give numpy arrays; torch tensors give torch tensors on q's
        device, without autograd (`flashpoint.torch.attention` has gradients).

        Args:
            q: Queries, (B, Hq, Sq, D) in layout `bhsd`; (B, S, D) and (S, D) are one head. float16, bfloat16, float32
                or float64.
            k: Keys, (B, Hk, Sk, D), of q's rank; Hq is a multiple of Hk. q's dtype; or float8_e4m3fn or int8, with
                `k_scale`. With `caches`: the keys of new tokens, which are written first; None only reads.
            v: Values, (B, Hk, Sk, Dv), likewise.

        Keyword Args:
            save: Let the server keep the inputs, o and lse for `attention_grad`: the result is a `SavedAttention`. Not
                with `caches`. Default: False.
            return_lse: Return (o, lse) in place of o. Default: False.
            with_meta: Return (result, `Meta`): timings, the backend, the seed of dropout. Default: False.
            caches: KV caches that hold the keys and values, one for each sequence of q: objects of `Client.cache`, or
                ids. All are on one engine (`Client.caches`, or `beside`). Default: none; k and v are all keys and
                values.
            at: With `caches`: positions, one for each sequence, where k and v are written. Later tokens of the layer
                are dropped. Default: the end of each cache.
            layer: Layer of the caches, from 0. Default: 0.
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
            o (B, Hq, Sq, Dv), in q's dtype, layout and rank. With `return_lse` (o, lse), lse float32 (B, Hq, Sq), the
            natural logarithm of the softmax's denominator. With `with_meta` (result, `Meta`). With `save` a
            `SavedAttention`. A query that sees no key has o = 0 and lse = −∞.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return await self._call(_calls.forward(q, k, v, keywords))

    @overload
    async def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[False] = False, **keywords: Unpack[Gradients],
    ) -> tuple[A, ...]: ...  # fmt: skip

    @overload
    async def attention_grad(
        self, do: A, q: A | None = None, k: A | None = None, v: A | None = None, *,
        with_meta: Literal[True], **keywords: Unpack[Gradients],
    ) -> tuple[tuple[A, ...], Meta]: ...  # fmt: skip

    @overload
    async def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any: ...  # fmt: skip

    async def attention_grad(
        self, do: Array, q: Array | None = None, k: Array | None = None, v: Array | None = None,
        **keywords: Unpack[OfSaved],
    ) -> Any:  # fmt: skip
        """Return the gradients of `attention` for `do`, the gradient of its o.

        The algorithm is FlashAttention-2's (Dao 2023, Algorithm 2). Options and other tensors are those of the forward;
        with dropout `dropout_seed` is needed.

        Args:
            do: Gradient of o, (B, Hq, Sq, Dv), q's dtype.
            q: Queries, as `attention` took them. None beside `saved`.
            k: Keys, as `attention` took them. None beside `saved`.
            v: Values, as `attention` took them. None beside `saved`.

        Keyword Args:
            saved: Result of `attention` with `save=True`, or its id. It takes the place of q, k, v, o, lse and the
                options: only `do`, `dlse`, `grads`, `deterministic`, `backend` and keywords of the call itself are
                taken beside it.
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
            (dq, dk, dv), or one tensor for each name in `grads`, in that order, of the shape and dtype of its input.
            With `with_meta` (that, `Meta`).

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return await self._call(_calls.backward(do, q, k, v, keywords))
