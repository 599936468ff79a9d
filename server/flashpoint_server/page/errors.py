"""Every error by its code: what it means and what to do. /docs/errors and docs/reference/errors.md show them."""

from __future__ import annotations

from typing import NamedTuple


class Meaning(NamedTuple):
    when: str
    do: str


_RETRY = "wait for `Retry-After`, then send it again; the SDK does"
_ITS_OWN = "use the id as it was answered, and the same key"
_AGAIN = "make it again: what a server holds is gone when it expires or its engine restarts"

ERRORS = {
    "malformed_body": Meaning(
        "the body cannot be parsed: bad JSON, a bad safetensors head, offsets that overlap or overrun, fewer or more "
        "bytes than the head says",
        "write the body with a library for its format; `detail` says where it ends to be valid",
    ),
    "malformed_head": Meaning(
        "the request is not HTTP/1.1, or its `Host` is missing, doubled or not valid",
        "use an HTTP/1.1 client, and look at what a proxy in between changes",
    ),
    "unauthorized": Meaning(
        "no key, or one that is not known", "send `Authorization: Bearer KEY`; the SDK takes `FLASHPOINT_API_KEY`"
    ),
    "forbidden": Meaning("the key lacks this permission", "ask for a key with that permission"),
    "cross_site": Meaning(
        "a browser sent it for a page of another site, whose origin `--cors-origins` does not allow",
        "name the page's origin in `--cors-origins`",
    ),
    "not_found": Meaning("no such address", "look at `/docs` for the addresses there are"),
    "cache_not_found": Meaning("there is no such cache, or it is another key's", _ITS_OWN),
    "saved_not_found": Meaning("there is no such saved forward, or it is another key's", _ITS_OWN),
    "method_not_allowed": Meaning("the address has other methods; `Allow` names them", "use one of those methods"),
    "not_acceptable": Meaning(
        "`Accept` takes neither encoding", "accept `application/json` or `application/vnd.safetensors`"
    ),
    "body_timeout": Meaning(
        "the body came too slowly", "send it faster; `--body-timeout` and `--body-rate` set the pace"
    ),
    "cache_position": Meaning("the position is beyond the end of the cache", "write at its length, or before it"),
    "cache_dropped": Meaning(
        "the call needs tokens before those that `keep` has left", "make the cache with more `keep`"
    ),
    "cache_full": Meaning("the tokens are over the cache's `max_length`", "make the cache with more `max_length`"),
    "cache_stale": Meaning(
        "a late copy of an earlier write: its `Idempotency-Key` came before the cache's last write",
        "nothing: the write took effect the first time",
    ),
    "cache_lost": Meaning(
        "the cache has expired, its key was removed, or its engine has restarted; known for an hour", _AGAIN
    ),
    "saved_lost": Meaning(
        "the saved forward has expired, its key was removed, or its engine has restarted; known for an hour", _AGAIN
    ),
    "body_too_large": Meaning(
        "the body is over its limit, by its length, by its head, or as it streams",
        "send less, or safetensors in place of JSON; `/info` has the limits",
    ),
    "work_too_large": Meaning(
        "the work could never fit: the device's memory, the limit of sequences, a JSON answer's limit, a "
        "verification's, the memory for caches and saved forwards",
        "cut the problem into several requests",
    ),
    "unsupported_media_type": Meaning(
        "the body has another type than the two, or a content coding",
        "send `application/json` or `application/vnd.safetensors`, not compressed",
    ),
    "host_not_allowed": Meaning(
        "the server does not answer to this `Host`: see `--allowed-hosts`", "name the host in `--allowed-hosts`"
    ),
    "cache_elsewhere": Meaning(
        "another replica behind the balancer holds the cache: `X-Flashpoint-Replica` names it",
        "send that header back; the SDK does, and the balancer must route by it",
    ),
    "invalid_request": Meaning(
        "well-formed, but not valid: names, shapes, dtypes, values of options and of headers; `errors` names each "
        "field",
        "correct each field that `errors` names",
    ),
    "queue_full": Meaning("the queue is full: it is at its limit of requests, bytes, FLOPs or benchmarks", _RETRY),
    "key_limit": Meaning(
        "over the limits of the key; `Retry-After` says when it may again, at least after",
        f"{_RETRY}. Memory (`detail` names the bytes that the key holds) needs another remedy: delete caches or saved "
        "forwards of the key; more than its whole `cache_bytes` never fits",
    ),
    "cache_memory": Meaning(
        "caches and saved forwards hold as much as `--cache-bytes` allows; what is alive is never evicted",
        "delete caches that are not needed, or wait until others do",
    ),
    "head_too_large": Meaning(
        "the request's line and fields are over 64 KiB, or the fields over 128", "send fewer and shorter header fields"
    ),
    "internal_error": Meaning(
        "our bug, logged with the request's id", "report it with `request_id` and the server's log lines of that id"
    ),
    "transfer_encoding": Meaning("`Transfer-Encoding` is not `chunked`", "send `Content-Length`, or chunked"),
    "not_ready": Meaning("the server is starting, or its engine starts again", _RETRY),
    "draining": Meaning("the server is shutting down", _RETRY),
    "out_of_memory": Meaning("the device ran out of memory for this request", _RETRY),
    "engine_lost": Meaning("the engine died while this request ran; another is started", _RETRY),
    "deadline_exceeded": Meaning(
        "the deadline of `X-Timeout-Ms` passed", "give it more time, or send it when the server has less to do"
    ),
}
