"""`Client`, and the settings that it shares with `AsyncClient`."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx

from flashpoint import _cache_calls, _calls, _proof, _saved
from flashpoint._arrays import Array
from flashpoint._attending import Attending
from flashpoint._caches import Cache
from flashpoint._calls import DEFAULT, Call, SavedAttention
from flashpoint._http.exchange import Exchange
from flashpoint._http.listening import Listening
from flashpoint._http.transport import AsyncTransport, Transport, is_direct
from flashpoint._keywords import Benchmark, CacheSizes, Verify
from flashpoint._runs import BenchmarkRun
from flashpoint.benchmark_schema import BenchmarkEvent
from flashpoint.errors import CacheError, ConnectionFailedError, FlashpointError, OverloadedError, invalid
from flashpoint.verify_schema import VerifyReport

DEFAULT_URL = "http://localhost:8000"
TIMEOUT = 60.0  # seconds for a whole call
LONGEST_TIMEOUT = 1_000_000  # seconds; the limit of the server's settings, near that of a socket's wait
RETRIES = 4
_FAILURES = (httpx.TransportError, FlashpointError)
_NOT_THERE = (OverloadedError, ConnectionFailedError)

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Direct = TypeVar("Direct", Transport, AsyncTransport)


class _Settings(Generic[Http]):
    """Base class of both clients: their settings."""

    _http: Http

    def __init__(
        self, url: str | None, api_key: str | None, timeout: float | None, retries: int, tls: ssl.SSLContext | None,
        replica: str,
    ) -> None:  # fmt: skip
        url = os.environ.get("FLASHPOINT_URL") or DEFAULT_URL if url is None else url
        if type(retries) is not int or retries < 0:
            raise invalid("retries", "must be an integer, 0 or more")
        try:
            self._parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise invalid("url", str(error)) from None
        if self._parsed.scheme not in ("http", "https") or not self._parsed.host:
            raise invalid("url", "must begin with http:// or https:// and name a host, as http://localhost:8000 does")
        self.url = url
        self._api_key = os.environ.get("FLASHPOINT_API_KEY") if api_key is None else api_key
        self._timeout = _seconds(timeout)
        self._retries = retries
        self._tls = tls
        if not isinstance(replica, str) or not (replica.isascii() and replica.isprintable() and len(replica) <= 128):
            raise invalid("replica", "must be printable ASCII of up to 128 characters")
        self._replica = replica

    def _http_settings(self) -> dict[str, Any]:
        headers = {"User-Agent": "flashpoint", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        # No limit on connections: a server refuses too many requests at once, and waiting here would only hide that.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return {"base_url": self.url, "headers": headers, "limits": limits, "timeout": self._timeout,
                "verify": self._tls or True}  # fmt: skip

    def _direct(self, transport: Callable[[httpx.URL, ssl.SSLContext | None], Direct]) -> Direct | None:
        """Return our own transport, or None to use httpx's, which supports proxies."""
        return transport(self._parsed, self._tls) if is_direct(self._parsed) else None

    def _exchange(self, call: Call, *, once: bool = False, stop: socket.socket | None = None) -> Exchange:
        if call.affinity is not None:
            call.affinity.replica = call.affinity.replica or self._replica
        timeout = self._timeout if call.timeout is DEFAULT else _seconds(call.timeout)
        return Exchange(call, timeout=timeout, retries=0 if once else self._retries, stop=stop)

    def _listening(self, id: str, after: int) -> Listening:
        return Listening(id, after, timeout=self._timeout, retries=self._retries)


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise invalid("timeout", "must be a number of seconds above 0 and up to 1,000,000, or None for no end")
    return float(timeout)


class Client(Attending, _Settings[httpx.Client]):
    """A client of a Flashpoint server. Thread-safe; it keeps and reuses its connections.

        with flashpoint.Client("http://localhost:8000") as client:
            o = client.attention(q, k, v, causal=True)

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
        transport: httpx.BaseTransport | None = None,
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
        self._own = None if transport else self._direct(Transport)
        self._http = httpx.Client(transport=transport or self._own, **self._http_settings())

    def delete_saved(self, saved: SavedAttention | str) -> None:
        """Free a saved forward. Do nothing if it is gone already.

        Args:
            saved: The result of `attention` with `save=True`, or its id.
        """
        with _calls.unless_gone():
            self._call(_saved.delete(saved))

    def cache(self, **shape: Unpack[CacheSizes]) -> Cache:
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
        return Cache(self, self._call(_cache_calls.create(shape))[0])

    def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[Cache]:
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
        return [Cache(self, one) for one in self._call(_cache_calls.create(shape, count))]

    def fork_caches(
        self, caches: Sequence[Cache], lengths: Sequence[int] | None = None, free: Sequence[Cache] = ()
    ) -> list[Cache]:
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
        return [Cache(self, one) for one in self._call(_cache_calls.fork(caches, lengths, free))]

    def delete_caches(self, caches: Sequence[Cache]) -> None:
        """Free the memory of several caches in one call. Caches that are gone already are ignored.

        Args:
            caches: Caches to delete.
        """
        try:
            self._call(_cache_calls.delete_many(caches))
        except CacheError:  # the server deleted none of them
            for cache in caches:
                cache.delete()

    def verify(
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
        report: VerifyReport = self._call(_proof.verify(q, k, v, keywords))
        return report

    def benchmark(self, **keywords: Unpack[Benchmark]) -> BenchmarkRun:
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
        return BenchmarkRun(self, self._call(_proof.submit(keywords)).id)

    def benchmark_run(self, id: str) -> BenchmarkRun:
        """Return a benchmark that was started before. Nothing is sent yet.

        Args:
            id: The benchmark's id, `BenchmarkRun.id`.
        """
        return BenchmarkRun(self, id)

    def info(self) -> dict[str, Any]:
        """Return the server's versions, device, backends with their features, limits, and what it holds."""
        found: dict[str, Any] = self._call(_calls.lookup("/info"))
        return found

    def ready(self) -> bool:
        """Return whether the server takes work now. False also if no server answers."""
        return self._health("/health/ready")

    def live(self) -> bool:
        """Return whether the server's process runs. False also if no server answers."""
        return self._health("/health/live")

    def close(self) -> None:
        """Close the connections, once released forwards are freed. The client cannot be used afterwards."""
        _saved.settle()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _health(self, path: str) -> bool:
        try:
            self._run(self._exchange(_calls.lookup(path), once=True))
        except _NOT_THERE:
            return False
        return True

    def _call(self, call: Call) -> Any:
        return self._run(self._exchange(call))

    def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Our own transport is called directly: of httpx's client it needs only the cookies."""
        if self._own is None or self._http.is_closed:  # a closed httpx client raises the error
            return self._http.send(request, stream=True)
        response = self._own.handle_request(request)
        if "set-cookie" in response.headers:  # set by a balancer
            response.request = request
            self._http.cookies.extract_cookies(response)
        return response

    def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                response = self._send(exchange.request(self._http))
                try:
                    exchange.begin(response)
                    if read_into := response.extensions.get("read_into"):  # only with our own transport
                        while count := read_into(space := exchange.space(), exchange.least(space)):
                            exchange.filled(count)
                    else:
                        assert isinstance(response.stream, httpx.SyncByteStream)
                        for chunk in response.stream:
                            exchange.feed(chunk)
                finally:
                    response.close()
                return exchange.answer()
            except _FAILURES as error:
                delay = exchange.failed(error)
            time.sleep(delay)

    def _listen(self, id: str, after: int) -> Iterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                response = self._http.send(listening.request(self._http), stream=True)
                try:
                    listening.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := read_into(listening.space(), 1):
                            listening.filled(count)
                            yield from listening.events()
                            if listening.ended:
                                return
                    else:
                        assert isinstance(response.stream, httpx.SyncByteStream)
                        for chunk in response.stream:
                            listening.feed(chunk)
                            yield from listening.events()
                            if listening.ended:
                                return
                finally:
                    response.close()
                listening.finish()
            except _FAILURES as error:
                time.sleep(listening.failed(error))
