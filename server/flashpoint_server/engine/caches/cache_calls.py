"""The calls on caches other than attention: create, list, append, fork, truncate, renew, export and delete."""

from __future__ import annotations

from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.idempotency import payload_of
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.memory import MappedMemory, tensor_in
from flashpoint_server.ipc.bodies import (
    AppendTokens,
    CacheCall,
    CreateCaches,
    DeleteCaches,
    ExportTokens,
    ForkCaches,
    ListCaches,
    RenewCaches,
    TruncateCache,
)
from flashpoint_server.ipc.messages import CacheRecord, Submit
from flashpoint_server.refusal import Refusal


def execute(store: CacheStore, call: CacheCall, submit: Submit, memory: MappedMemory) -> list[CacheRecord]:
    """Execute a call, and return the affected caches. Raises Refusal, and MemoryError.

    `submit` says where the call's tensors are in the shared `memory`.
    """
    named = (call.operation, call.caches)
    payload = payload_of(named, submit.inputs, memory) if call.key else b""
    terms, ids = Terms(call.owner, call.quota, call.key, payload, call.most), call.caches
    match call.operation:
        case CreateCaches() as made:
            return store.create(terms, made.shape, made.count, made.max_length, made.keep, made.ttl)
        case ListCaches() as page:
            return store.listed(terms, page.after, page.limit)
        case ForkCaches() as fork:
            order = [ids[n] for n in fork.order]
            return store.fork(terms, order[: fork.forked], fork.lengths, order[fork.forked :])
        case AppendTokens() as tokens:
            k, v = (tensor_in(memory, t) for t in submit.inputs)
            if tokens.layout != "bhsd":
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            store.write(terms, ids, tokens.layer, None if tokens.at is None else [tokens.at], [(k, v)])
        case TruncateCache(length):
            return [store.truncate(terms, ids[0], length)]
        case ExportTokens() as export:
            _export(store, terms, ids, export, submit, memory)
        case DeleteCaches():
            store.delete(terms, ids)
            return []
        case RenewCaches():
            return store.renew(terms, ids)
    return store.look(terms, ids)


def _export(
    store: CacheStore, terms: Terms, ids: tuple[int, ...], export: ExportTokens, submit: Submit,
    memory: MappedMemory,
) -> None:  # fmt: skip
    """Copy a layer's tokens to the outputs. Raises Refusal 409 if they are not those in the range of `export`."""
    (cache,) = store.find(terms, ids)
    track = cache.tracks[export.layer]
    k, v, *scales = (tensor_in(memory, t) for t in submit.outputs)
    if (track.first, track.length) != (export.first, export.length):
        raise Refusal("cache_position", "the cache's length changed while it was read: send the request again")
    for piece in track.pieces(track.first, track.length):
        inside = slice(piece.start - track.first, piece.start - track.first + piece.k.shape[2])
        k[:, inside], v[:, inside] = piece.k[0], piece.v[0]
    if scales:
        for run in track.scales(track.first, track.length):
            inside = slice(run.start - track.first, run.start - track.first + run.k.shape[2])
            scales[0][:, inside], scales[1][:, inside] = run.k[0], run.v[0]
