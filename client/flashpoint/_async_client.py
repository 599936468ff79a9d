"""`AsyncClient`: the methods of `Client`, for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack

import httpx

from flashpoint import _cache_calls, _calls, _proof, _saved
from flashpoint._arrays import Array
from flashpoint._attending import AsyncAttending
from flashpoint._caches import AsyncCache
from flashpoint._calls import Call, SavedAttention
from flashpoint._client import _FAILURES, _NOT_THERE, RETRIES, TIMEOUT, _Settings
from flashpoint._http.exchange import Exchange
from flashpoint._http.transport import ASYNC, AsyncTransport
from flashpoint._keywords import Benchmark, CacheSizes, Verify
from flashpoint._runs import AsyncBenchmarkRun
from flashpoint.benchmark_schema import BenchmarkEvent
from flashpoint.errors import CacheError
from flashpoint.verify_schema import VerifyReport


class AsyncClient(AsyncAttending, _Settings[httpx.AsyncClient]):
    """The asyncio twin of `Client`: the same methods, awaited. For one event loop.

        async with flashpoint.AsyncClient("http://localhost:8000") as client:
            o = await client.attention(q, k, v, causal=True)

    Every method raises the errors of `flashpoint.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = TIMEOUT,
        retries: int = RETRIES,
        tls: ssl.SSLContext | None = None,
        replica: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Make a client. Nothing is sent yet.

        Args:
            url: Address of the server. None is FLASHPOINT_URL, or http://localhost:8000.
            api_key: Sent as a bearer key. None is FLASHPOINT_API_KEY, if it is set; "" sends none.
            timeout: Seconds for a whole call, retries included. The server knows it as the deadline. None waits without
                end.
            retries: How often a call is sent again: when there was no connection or it broke (also a proxy's own 500 or
                502), or the server was full (429) or not ready (503). The delay is the server's `Retry-After`, or
                doubles.
            tls: TLS settings, for a private certificate authority or a client certificate. None is the system's
                authorities.
            replica: Sent as X-Flashpoint-Replica when caches are made, for a balancer that routes by that header. Later
                calls with a cache send what the answers said. Printable ASCII, up to 128 characters.
            transport: httpx transport in place of the client's own, which is used where the environment names no proxy.
                Another transport applies the timeout to each wait, so an answer that stalls may take longer.

        Raises:
            InvalidInputError: an argument is not valid.
        """
        super().__init__(url, api_key, timeout, retries, tls, replica)
        self._own = self._direct(AsyncTransport) if transport is None and ASYNC else None
        self._http = httpx.AsyncClient(transport=transport or self._own, **self._http_settings())

    async def delete_saved(self, saved: SavedAttention | str) -> None:
        """Free a saved forward. Do nothing if it is gone already.

        Args:
            saved: The result of `attention` with `save=True`, or its id.
        """
        with _calls.unless_gone():
            await self._call(_saved.delete(saved))

    async def cache(self, **shape: Unpack[CacheSizes]) -> AsyncCache:
        """Make a KV cache on the server, which holds the keys and values of one sequence.

        A size is one number for all layers, or a sequence with one for each layer.

        Keyword Args:
            layers: Number of layers. Default: 1.
            kv_heads: Key/value heads, Hk. Default: 8.
            head_dim: Columns of q and k, D. Default: 64.
            value_dim: Columns of v, Dv. Default: None, as `head_dim`.
            dtype: `float32`, `bfloat16` or `float16`: the dtype of q, k and v. Or `float8_e4m3fn` or `int8`: the cache
                stores 8 bits and a scale for each token and head; q, k and v are in any of the other three. Default:
                "float32".
            max_length: Largest number of tokens; their memory is reserved now. Default: None, memory grows with the
                tokens.
            keep: Tokens at the end of a layer that stay; the server may free earlier ones (sliding windows). Default:
                None, all.
            ttl_s: Time to live in seconds since the last use. Default: None, the server's own (600).
            beside: A cache, or its id, on whose engine this one is made, as a call over both needs. Default: None, any
                engine.

        Returns:
            The cache, empty. At the end of a `with` it is deleted.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return AsyncCache(self, (await self._call(_cache_calls.create(shape)))[0])

    async def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[AsyncCache]:
        """Make several caches of one shape on one engine, so that one call can use all of them.

        Args:
            count: Number of caches.

        Keyword Args:
            layers: Number of layers. Default: 1.
            kv_heads: Key/value heads, Hk. Default: 8.
            head_dim: Columns of q and k, D. Default: 64.
            value_dim: Columns of v, Dv. Default: None, as `head_dim`.
            dtype: `float32`, `bfloat16` or `float16`: the dtype of q, k and v. Or `float8_e4m3fn` or `int8`: the cache
                stores 8 bits and a scale for each token and head; q, k and v are in any of the other three. Default:
                "float32".
            max_length: Largest number of tokens; their memory is reserved now. Default: None, memory grows with the
                tokens.
            keep: Tokens at the end of a layer that stay; the server may free earlier ones (sliding windows). Default:
                None, all.
            ttl_s: Time to live in seconds since the last use. Default: None, the server's own (600).
            beside: A cache, or its id, on whose engine this one is made, as a call over both needs. Default: None, any
                engine.

        Returns:
            The caches, empty.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return [AsyncCache(self, one) for one in await self._call(_cache_calls.create(shape, count))]

    async def fork_caches(
        self, caches: Sequence[AsyncCache], lengths: Sequence[int] | None = None, free: Sequence[AsyncCache] = ()
    ) -> list[AsyncCache]:
        """Copy caches, and delete others: all at once, or nothing. Copies share memory until they are written.

        Args:
            caches: Caches to copy. One that is named several times is copied as often.
            lengths: Number of tokens of each copy. None copies all tokens.
            free: Caches to delete.

        Returns:
            The copies, in the order of `caches`.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return [AsyncCache(self, one) for one in await self._call(_cache_calls.fork(caches, lengths, free))]

    async def delete_caches(self, caches: Sequence[AsyncCache]) -> None:
        """Free the memory of several caches in one call. Caches that are gone already are ignored.

        Args:
            caches: Caches to delete.
        """
        try:
            await self._call(_cache_calls.delete_many(caches))
        except CacheError:
            for cache in caches:
                await cache.delete()

    async def verify(
        self, q: Array | None = None, k: Array | None = None, v: Array | None = None, **keywords: Unpack[Verify]
    ) -> VerifyReport:
        """Compare a backend's answers, or your own, with float64, and judge whether they are near enough.

        The problem has your q, k and v. If you pass any of `o`, `lse`, `dq`, `dk`, `dv`, `dattn_mask` and `dsinks`,
        these are judged, otherwise the answers of a backend. Without q, k and v the server draws a problem by `shape`,
        `dtype`, `seed`, `direction` and `extras`.

        Args:
            q: Queries, (B, Hq, Sq, D) in layout `bhsd`. None: the server draws the tensors.
            k: Keys, (B, Hk, Sk, D).
            v: Values, (B, Hk, Sk, Dv).

        Keyword Args:
            shape: Sizes of a problem that the server draws: `batch`, `q_heads`, `kv_heads`, `q_len`, `kv_len`,
                `head_dim`, `value_dim`. `q_len` and `head_dim` are needed. Not beside tensors.
            dtype: Dtype of the drawn q, k, v and do. Default: "float32".
            seed: Seed of the drawn tensors, 0 to 2^63 − 1. Default: 0.
            direction: Judge o and lse (`forward`), the gradients (`backward`), or `both`. Default: "both".
            extras: Optional inputs that are drawn too: some of `bool_mask`, `float_mask`, `block_mask`, `alibi_slopes`,
                `sinks`, `q_lengths`, `kv_lengths`. Default: none.
            grads: Gradients to judge: some of `dq`, `dk`, `dv`, `dattn_mask` and `dsinks`. Default: ("dq", "dk", "dv").
            progress: Called with each `VerifyProgress` that the server sends: some a second, the first when the
                verification begins. An exception that it raises ends the call and the verification. Default: None.
            do: Gradient of o, (B, Hq, Sq, Dv): judge the gradients too. Default: None.
            dlse: Gradient of lse, (B, Hq, Sq) float32. Default: None, which is 0.
            o: Your own output, (B, Hq, Sq, Dv): it is judged, and no backend runs. So are the six tensors that follow.
            lse: Your own log-sum-exp, (B, Hq, Sq).
            dq: Your own gradient of q, of its shape.
            dk: Your own gradient of k, of its shape.
            dv: Your own gradient of v, of its shape.
            dattn_mask: Your own gradient of a float `attn_mask`, of its shape.
            dsinks: Your own gradient of `sinks`, of its shape.
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
            The errors of each tensor, their bounds, and the verdict `ok`.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        report: VerifyReport = await self._call(_proof.verify(q, k, v, keywords))
        return report

    async def benchmark(self, **keywords: Unpack[Benchmark]) -> AsyncBenchmarkRun:
        """Start to time a grid, or a preset, on the server's device.

        If the connection breaks after the call was sent, it is not sent again: that could start two benchmarks.

        Keyword Args:
            preset: Named grid, in place of one of your own: `papers` or `h100`. Default: None.
            shapes: Sizes to time, each as the `shape` of `verify`.
            dtypes: Dtypes to time: some of `float32`, `float16` and `bfloat16`. Default: ("float32",).
            causal: Time without the causal mask, with it, or both. Default: (False,).
            directions: `forward`; `backward`, from saved o and lse; `both`, as in training. Default: ("forward",).
            backends: Implementations to time, in this order. Default: all that the device supports.
            relative_precision: Repeat until the 95% confidence interval of the median is this part of it. Default:
                0.01.
            max_seconds: Largest time in seconds that one case is repeated. Default: 3.
            warmup_ms: Warm-up of each case in milliseconds. Default: 50.
            timeout: Seconds for the whole call, retries included; the server knows it as the deadline. None waits
                without end. Default: the client's own.
            priority: 0 to 9; a higher priority runs sooner. Default: 0.
            request_id: Name of the call in the server's log, printable ASCII. Default: the server makes one.

        Returns:
            The benchmark, which runs: `events`, `wait`, `cancel`.

        Raises:
            FlashpointError: the errors of `flashpoint.errors`. InvalidInputError names each field that is not valid.
        """
        return AsyncBenchmarkRun(self, (await self._call(_proof.submit(keywords))).id)

    def benchmark_run(self, id: str) -> AsyncBenchmarkRun:
        """Return a benchmark that was started before. Nothing is sent yet.

        Args:
            id: The benchmark's id, `BenchmarkRun.id`.
        """
        return AsyncBenchmarkRun(self, id)

    async def info(self) -> dict[str, Any]:
        """Return the server's versions, device, backends with their features, limits, and what it holds."""
        found: dict[str, Any] = await self._call(_calls.lookup("/info"))
        return found

    async def ready(self) -> bool:
        """Return whether the server takes work now. False also if no server answers."""
        return await self._health("/health/ready")

    async def live(self) -> bool:
        """Return whether the server's process runs. False also if no server answers."""
        return await self._health("/health/live")

    async def aclose(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _health(self, path: str) -> bool:
        try:
            await self._run(self._exchange(_calls.lookup(path), once=True))
        except _NOT_THERE:
            return False
        return True

    async def _call(self, call: Call) -> Any:
        return await self._run(self._exchange(call))

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Our own transport is called directly: of httpx's client it needs only the cookies."""
        if self._own is None or self._http.is_closed:
            return await self._http.send(request, stream=True)
        response = await self._own.handle_async_request(request)
        if "set-cookie" in response.headers:
            response.request = request
            self._http.cookies.extract_cookies(response)
        return response

    async def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                response = await self._send(exchange.request(self._http))
                try:
                    exchange.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := await read_into(space := exchange.space(), exchange.least(space)):
                            exchange.filled(count)
                    else:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        async for chunk in response.stream:
                            exchange.feed(chunk)
                finally:
                    await response.aclose()
                return exchange.answer()
            except _FAILURES as error:
                delay = exchange.failed(error)
            await asyncio.sleep(delay)

    async def _listen(self, id: str, after: int) -> AsyncIterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                response = await self._http.send(listening.request(self._http), stream=True)
                try:
                    listening.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := await read_into(listening.space(), 1):
                            listening.filled(count)
                            for event in listening.events():
                                yield event
                            if listening.ended:
                                return
                    else:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        async for chunk in response.stream:
                            listening.feed(chunk)
                            for event in listening.events():
                                yield event
                            if listening.ended:
                                return
                finally:
                    await response.aclose()
                listening.finish()
            except _FAILURES as error:
                await asyncio.sleep(listening.failed(error))
