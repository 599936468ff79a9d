"""The calls on caches other than attention: create, list, append, fork, truncate, renew, export and delete."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.memory import tensor_in
from flashpoint_server.ipc.messages import AskCaches, CacheRecord, CacheShape
from flashpoint_server.refusal import Refusal


def asked_of_caches(store: CacheStore, asked: AskCaches, memory: Mapping[int, mmap.mmap]) -> list[CacheRecord]:
    """Execute a call, and return the caches that it is about. Raises Refusal, and MemoryError."""
    terms, said, ids = Terms(asked.owner, asked.quota, asked.key), asked.arguments, asked.caches
    match asked.what:
        case "create":
            shape = CacheShape(
                tuple(said["kv_heads"]), tuple(said["head_dim"]), tuple(said["value_dim"]), said["dtype"]
            )
            return store.create(terms, shape, said["count"], said["max_length"], said["keep"], said["ttl"])
        case "list":
            return store.listed(terms)
        case "fork":
            count = said["forked"]
            order = [ids[n] for n in said["order"]]
            return store.fork(terms, order[:count], said["lengths"], order[count:])
        case "append":
            k, v = (tensor_in(memory, t) for t in asked.inputs)
            if said["layout"] != "bhsd":
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            at = None if said["at"] is None else [said["at"]]
            store.write(terms, ids, said["layer"], at, [(k, v)])
        case "truncate":
            return [store.truncate(terms, ids[0], said["length"])]
        case "export":
            _export(store, terms, asked, memory)
        case "delete":
            store.delete(terms, ids)
            return []
    return store.look(terms, ids)


def _export(store: CacheStore, terms: Terms, asked: AskCaches, memory: Mapping[int, mmap.mmap]) -> None:
    """Copy a layer's tokens to the outputs. Raises Refusal 409 if they are not the requested ones."""
    (cache,) = store.find(terms, asked.caches)
    said = asked.arguments
    track = cache.tracks[said["layer"]]
    k, v, *scales = (tensor_in(memory, t) for t in asked.outputs)
    if (track.first, track.length) != (said["first"], said["length"]):
        raise Refusal("cache_position", "the cache's length changed while it was read: send the request again")
    for piece in track.pieces(track.first, track.length):
        inside = slice(piece.start - track.first, piece.start - track.first + piece.k.shape[2])
        k[:, inside], v[:, inside] = piece.k[0], piece.v[0]
    if scales:
        for run in track.scales(track.first, track.length):
            inside = slice(run.start - track.first, run.start - track.first + run.k.shape[2])
            scales[0][:, inside], scales[1][:, inside] = run.k[0], run.v[0]
