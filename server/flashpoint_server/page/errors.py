"""The meaning of each error code, and what to do. /docs/errors and docs/reference/errors.md show them."""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    when: str
    do: str


_RETRY = "wait as long as `Retry-After` says, then retry; the SDK does this"
_ITS_OWN = "use the id exactly as the server returned it, with the same API key"
_AGAIN = "create it again; the server cannot recover it"

ERRORS = {
    "malformed_body": Meaning(
        "the body cannot be parsed: invalid JSON, an invalid safetensors head, tensor offsets that overlap or exceed "
        "the body, or a body shorter or longer than its head says",
        "write the body with a library for its format; `detail` says where the error is",
    ),
    "malformed_head": Meaning(
        "the request is not HTTP/1.1, or its `Host` is missing, repeated or not valid",
        "use an HTTP/1.1 client, and check whether a proxy changes the request",
    ),
    "unauthorized": Meaning(
        "the request has no API key, or the server does not know the key",
        "send `Authorization: Bearer KEY`; the SDK reads the key from `FLASHPOINT_API_KEY`",
    ),
    "forbidden": Meaning("the API key lacks this permission", "ask the operator for a key with this permission"),
    "cross_site": Meaning(
        "a browser sent the request for a page whose origin `--cors-origins` does not allow",
        "add the page's origin to `--cors-origins`",
    ),
    "not_found": Meaning("the path does not exist", "see `/docs` for all paths"),
    "cache_not_found": Meaning("the cache does not exist, or belongs to another API key", _ITS_OWN),
    "saved_not_found": Meaning("the saved forward does not exist, or belongs to another API key", _ITS_OWN),
    "method_not_allowed": Meaning(
        "the path does not support this method; `Allow` lists the methods", "use one of those methods"
    ),
    "not_acceptable": Meaning(
        "`Accept` allows neither of the two encodings", "accept `application/json` or `application/vnd.safetensors`"
    ),
    "body_timeout": Meaning(
        "the body arrived too slowly", "send it faster; `--body-timeout` and `--body-rate` set the minimum rate"
    ),
    "cache_position": Meaning(
        "the position is beyond the end of the cache", "write at the cache's length, or before it"
    ),
    "cache_dropped": Meaning(
        "the call needs tokens that the cache has dropped because of `keep`", "create the cache with a larger `keep`"
    ),
    "cache_full": Meaning("the tokens exceed the cache's `max_length`", "create it with a larger `max_length`"),
    "cache_stale": Meaning(
        "the request is a late copy of an earlier write: a newer write followed its `Idempotency-Key`",
        "do nothing: the write took effect the first time",
    ),
    "cache_lost": Meaning(
        "the cache expired, its API key was removed, or its engine restarted; the server knows this for an hour", _AGAIN
    ),
    "saved_lost": Meaning(
        "the saved forward expired, its API key was removed, or its engine restarted; the server knows this for an "
        "hour",
        _AGAIN,
    ),
    "body_too_large": Meaning(
        "the body is over its limit: its `Content-Length`, its head or its stream says so",
        "send less data, or send safetensors instead of JSON; `/info` has the limits",
    ),
    "work_too_large": Meaning(
        "the request can never fit a limit: device memory, number of sequences, size of a JSON answer, size of a "
        "verification, or memory for caches and saved forwards",
        "split the problem into several requests",
    ),
    "unsupported_media_type": Meaning(
        "the body has neither of the two media types, or it has a content coding",
        "send `application/json` or `application/vnd.safetensors`, not compressed",
    ),
    "host_not_allowed": Meaning(
        "the server does not accept this `Host`", "use a host that `--allowed-hosts` allows, or add this host to it"
    ),
    "cache_elsewhere": Meaning(
        "another replica behind the balancer holds the cache; `X-Flashpoint-Replica` names it",
        "send this header with the retry; the SDK does this. The balancer must route by this header",
    ),
    "backend_renamed": Meaning(
        "the request names the backend `torch` on a CPU, where the kernels in C had this name in earlier versions",
        "send `cpu`, or `auto`, which servers of all versions take",
    ),
    "invalid_request": Meaning(
        "the request can be parsed but is not valid: a name, a shape, a dtype, or the value of an option or a header; "
        "`errors` names each field",
        "correct each field that `errors` names",
    ),
    "idempotency_key_reused": Meaning(
        "an earlier call with the same `Idempotency-Key` had another method, path or payload",
        "send each call with a key of its own, and only its retries with the same key",
    ),
    "queue_full": Meaning("the queue is full: its limit of requests, bytes, FLOPs or benchmarks is reached", _RETRY),
    "key_limit": Meaning(
        "the API key is over its limits; `Retry-After` is the shortest time to wait",
        f"{_RETRY}. If `detail` names the bytes that the key holds: delete its caches or saved forwards. A cache "
        "larger than the key's `cache_bytes` never fits",
    ),
    "cache_memory": Meaning(
        "caches and saved forwards use all of `--cache-bytes`; the server does not evict them before they expire",
        "delete caches that you do not need, or wait until others expire or are deleted",
    ),
    "head_too_large": Meaning(
        "the request line and header are over 64 KiB, or there are more than 128 header fields",
        "send fewer and shorter header fields",
    ),
    "internal_error": Meaning(
        "a bug in the server; it is logged with the request's id",
        "report it with `request_id` and the server's log lines for this id",
    ),
    "transfer_encoding": Meaning(
        "`Transfer-Encoding` is not `chunked`", "send `Content-Length`, or use the chunked coding"
    ),
    "not_ready": Meaning("the server is starting, or its engine is restarting", _RETRY),
    "draining": Meaning("the server is shutting down", _RETRY),
    "out_of_memory": Meaning("the device, or an HTTP process, ran out of memory for this request", _RETRY),
    "engine_lost": Meaning("the engine died while it ran this request; the server starts a new engine", _RETRY),
    "deadline_exceeded": Meaning(
        "the deadline of `X-Timeout-Ms`, of `timeout` in `/v2`, or of the gRPC call passed",
        "set a longer deadline, or retry when the server is less busy",
    ),
}
