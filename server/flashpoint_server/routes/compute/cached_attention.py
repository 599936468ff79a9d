"""POST /attention over KV caches on the server: find the engine that holds them, estimate the cost, and compute it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from flashpoint_contract.caches import ID_LENGTH, CacheOptions, LayerShape, key_weights_info
from flashpoint_contract.options import NAME
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.access.cache_ids import CacheId
from flashpoint_server.formats.codec import in_turns
from flashpoint_server.formats.message import TensorMessage
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.bodies import CacheCall, CacheRef, LookAtCaches, encode, with_shapes
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.price import LITTLE
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.plan import Plan
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import (
    Numbers,
    admit,
    carry_out,
    idempotency_key,
    stage,
    submit,
)
from flashpoint_server.service import Service

REMEMBERED = 1 << 16  # maximum number of caches whose lengths are stored, to estimate the costs of later calls


async def compute_cached(service: Service, request: Request, message: TensorMessage, numbers: Numbers) -> Job:
    """Compute a call of attention over caches: plan, admit, stage and submit it. Raises Refusal and ClientGoneError."""
    set_replica_header(service, request)
    cache_options, options, seed = message.caches, None, message.seed
    assert cache_options is not None
    ids = await found_caches(service, request, cache_options.caches)
    layer = _layer(cache_options, ids)
    writes = "k" in dict(message.inputs)
    if writes and len(cache_options.caches) > 1 and len(set(cache_options.caches)) < len(cache_options.caches):
        raise invalid([("caches", "contains a cache twice, but the call writes to it")])
    if cache_options.at is not None and not writes:
        raise invalid([("at", "needs k and v: it says where they are written")])
    key = idempotency_key(request) if writes else ""
    if key and message.checked.dropout_p and seed is None:
        options, seed = replace(message.checked, dropout_seed=0), _seed_of(key, cache_options)
    plan = service.plans.of(message, request.device, layer, options)
    rates = plan.rates
    assert rates is not None
    serials, lengths, reads = [], [], []
    for one in ids:
        length, read = service.cache_lengths.get((one.incarnation, one.serial), (0, 0))
        serials.append(one.serial)
        lengths.append(length)
        reads.append(read)
    cache_ref = CacheRef(
        owner=request.caller.name,
        caches=tuple(serials),
        layer=cache_options.layer,
        at=cache_options.at,
        key=key,
        quota=cache_quota(request),
        left=plan.left,
        asked=encode(options or message.checked) if key else b"",
    )
    if message.checked.return_key_weights:
        plan = await _with_key_weights(service, request, message, plan, cache_options, ids)
    engine, price = ids[0].incarnation, rates.price(lengths, sum(reads))
    job = await carry_out(
        service, request, message, plan, numbers, price, seed=seed, cache_ref=cache_ref, incarnation=engine
    )
    lengths = job.done.metadata["lengths"]
    if message.checked.return_key_weights:
        request.plan = _cut(plan, job, max(lengths))
    reads = job.done.metadata.pop("reads", lengths)
    for one, length, read in zip(ids, lengths, reads, strict=True):
        service.cache_lengths[one.incarnation, one.serial] = length, read
        service.cache_lengths.move_to_end((one.incarnation, one.serial))
    while len(service.cache_lengths) > REMEMBERED:
        service.cache_lengths.popitem(last=False)
    service.admission.settle(request, rates.price(lengths, sum(reads)))
    return job


async def _with_key_weights(
    service: Service,
    request: Request,
    message: TensorMessage,
    plan: Plan,
    cache_options: CacheOptions,
    ids: Sequence[CacheId],
) -> Plan:
    """Return the plan of one call that returns key weights, with memory for all keys, which it reserves.

    The caches' lengths are asked of their engine, unless the call says where it writes. Raises Refusal.
    """
    spec, outputs = plan.spec, dict(plan.spec.outputs)
    del outputs["key_weights"]
    if not request.inside:
        admit(service, request, Layout.of(message.inputs, outputs).nbytes)
    ends = cache_options.at or await _lengths(service, request, ids, cache_options.layer)
    new = spec.q_len if "k" in dict(message.inputs) else 0
    outputs["key_weights"] = key_weights_info(spec, max(ends) + new)
    service.admission.hold(request, outputs["key_weights"].nbytes)
    answers = {name: outputs[name] for name in plan.answers}
    return replace(plan.placed(Layout.of(message.inputs, outputs)), answers=answers)


async def _lengths(service: Service, request: Request, ids: Sequence[CacheId], layer: int) -> list[int]:
    """Return the present lengths of a layer of caches. Raises Refusal and ClientGoneError."""
    look = CacheCall(request.caller.name, LookAtCaches(), tuple([one.serial for one in ids]))
    job = await submit(service, request, stage(service, request, Layout.of([], {})), look, LITTLE, ids[0].incarnation)
    return [one.lengths[layer] for one in job.caches]


def _cut(plan: Plan, job: Job, keys: int) -> Plan:
    """Return the plan with key weights of `keys` keys, one row after another, at the start of their memory."""
    reserved = plan.answers["key_weights"]
    info = TensorInfo(reserved.dtype, (*reserved.shape[:-1], keys))
    job.outputs = with_shapes(job.outputs, {"key_weights": info.shape})
    return replace(plan, answers={**plan.answers, "key_weights": info})


def _layer(cache_options: CacheOptions, ids: Sequence[CacheId]) -> LayerShape:
    """Return the shape of the layer, which must be the same in all caches of the call. Raises Refusal 422."""
    if cache_options.layer >= (layers := ids[0].shape.layers):
        many = f"{layers} layer{'' if layers == 1 else 's'}"
        raise invalid([("layer", f"{cache_options.layer} does not exist: each cache has {many}, from 0")])
    layer = ids[0].layer(cache_options.layer)
    for one in ids[1:]:
        if one.shape.layers <= cache_options.layer or one.layer(cache_options.layer) != layer:
            raise invalid([("caches", "have different shapes or dtypes in this layer")])
    return layer


def _seed_of(key: str, cache_options: CacheOptions) -> int:
    """Return a dropout seed of 53 bits that is the same when a write is repeated, so that the answers are equal."""
    text = json.dumps([key, cache_options.layer, *cache_options.caches])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 11


def set_replica_header(service: Service, request: Request) -> None:
    """Set the answer's X-Flashpoint-Replica to the request's value if it is valid, else to this replica's name.

    Load balancers route by the field, so a caller must get the value back that led to this replica.
    """
    sent = request.headers.get("x-flashpoint-replica", "")
    request.replica = sent if NAME.fullmatch(sent) else service.cache_ids.replica


async def found_caches(
    service: Service, request: Request, texts: Sequence[str], fields: Sequence[str] = ()
) -> list[CacheId]:
    """Return the decoded ids of caches, which must all be on one engine of this replica.

    Errors name a cache by its entry in `fields`; without `fields`, as `caches.0`, `caches.1` and so on. Raises Refusal
    404, 410, 421, 422 and 503.
    """
    owner, own_replica = request.caller.name, service.cache_ids.replica
    if len(texts) == 1 and len(texts[0]) <= ID_LENGTH:
        only = service.cache_ids.read(owner, texts[0])
        if only is not None and only.replica == own_replica and service.engine.holder(only.incarnation):
            return [only]  # most calls end here: one valid cache
    ids: list[CacheId | None] = []
    async for some in in_turns(texts):
        ids += [service.cache_ids.read(owner, text) if len(text) <= ID_LENGTH else None for text in some]
    known = [one for one in ids if one is not None]
    here = {one.incarnation for one in known if one.replica == own_replica}
    there = {incarnation: service.engine.holder(incarnation) for incarnation in here}
    errors = []
    for place, one in enumerate(ids):
        field = fields[place] if fields else f"caches.{place}"
        if one is None:
            errors.append((field, "cache_not_found: this cache does not exist, or belongs to another API key"))
        elif one.replica != own_replica:
            detail = f"replica {one.replica!r} holds the cache: send X-Flashpoint-Replica: {one.replica}"
            errors.append((field, f"cache_elsewhere: {detail}"))
        elif not there[one.incarnation]:
            errors.append((field, "cache_lost: the engine that held the cache restarted"))
    if errors:
        code, _, detail = errors[0][1].partition(": ")
        if code == "cache_elsewhere":
            request.replica = next(one.replica for one in known if one.replica != own_replica)
        raise Refusal(code, detail, errors=errors)
    if len({one.incarnation for one in known}) > 1:
        raise invalid([("caches", "are on different engines: create them with one call, with `beside`, or by a fork")])
    return known


def cache_count(request: Request) -> int | None:
    """Return the maximum number of the caller's caches and saved forwards; None without a quota."""
    return None if request.caller.quota is None else request.caller.quota.cache_count


def cache_quota(request: Request) -> int | None:
    """Return the caller's limit in bytes for its caches and saved forwards; None without a quota."""
    return None if request.caller.quota is None else request.caller.quota.cache_bytes
