"""POST /attention over KV caches on the server: find the engine that holds them, estimate the cost, and compute it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple, cast

from msgspec import Raw

from flashpoint_contract import saved
from flashpoint_contract.caches import (
    CACHE_OPTIONS,
    ID_LENGTH,
    CacheOptions,
    LayerShape,
    key_weights_info,
    plan_cached,
)
from flashpoint_contract.options import NAME, Options
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import ITEMSIZE, TensorInfo
from flashpoint_kernels.dispatching.support import Backends, choose_backend
from flashpoint_kernels.problems.cost import Extent, flops_of, seconds_of
from flashpoint_server.access.admission import check_size
from flashpoint_server.access.cache_ids import CacheId
from flashpoint_server.formats.codec import in_turns
from flashpoint_server.formats.message import RequestPlan, TensorMessage, read_options, refuse_invalid
from flashpoint_server.ipc.bodies import CacheCall, CacheRef, LookAtCaches, pack_options
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import LITTLE, MOST_FLOPS, Price
from flashpoint_server.ipc.staging import Layout, Place
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import (
    Computed,
    Numbers,
    RouteRequest,
    admit,
    carry_out,
    idempotency_key,
    make_job,
    stage,
    submit,
)

# Seconds in which one core reads a byte of keys or values. 8-bit values count as float32, because they are converted.
READ_SECONDS = 1e-10
_CALL, _PLAN = "call over caches", "plan over caches"  # keys of `TensorMessage.derived`
_MANY = 1 << 30  # the seconds for one (query, key) pair are those predicted for this many pairs, divided by this number
REMEMBERED = 1 << 16  # maximum number of caches whose lengths are stored, to estimate the costs of later calls


async def compute_cached(request: RouteRequest, message: TensorMessage, numbers: Numbers) -> Computed:
    """Compute a call of attention over caches: plan, admit, stage and submit it. Raises Refusal and ClientGoneError."""
    service, device = request.service, request.device
    set_replica_header(request)
    cache_options, options = call = _call(message)
    ids = await found_caches(request, cache_options.caches)
    layer = _layer(cache_options, ids)
    writes = any(name == "k" for name, _ in message.inputs)
    if writes and len(cache_options.caches) > 1 and len(set(cache_options.caches)) < len(cache_options.caches):
        raise invalid([("caches", "contains a cache twice, but the call writes to it")])
    if cache_options.at is not None and not writes:
        raise invalid([("at", "needs k and v: it says where they are written")])
    key = idempotency_key(request) if writes else ""
    if key and options.dropout_p and options.dropout_seed is None:
        call = _CacheCall(cache_options, replace(options, dropout_seed=_seed_of(key, cache_options)))
    plan = _plan(message, call, layer, device)
    spec = plan.spec
    check_size(spec, device.memory, service.settings.sequence_limit)
    known = [service.cache_lengths.get(one.serial, (0, 0)) for one in ids]
    price = plan.rates.price([length for length, _ in known], sum(read for _, read in known))
    cache_ref = CacheRef(
        owner=request.caller.name,
        caches=tuple([one.serial for one in ids]),
        shape=layer,
        layer=cache_options.layer,
        at=cache_options.at,
        key=key,
        quota=cache_quota(request),
        left=plan.left,
        asked=bytes(pack_options(call.options)) if key else b"",
    )
    layout, text, engine = plan.layout, numbers(spec), ids[0].incarnation
    if options.return_key_weights:
        layout, text = await _with_key_weights(request, message, plan, call, ids, text)
    planned = RequestPlan(spec, plan.backend, price, device, plan.options, layout)
    job, answer = await carry_out(
        request, message, planned, text, layout.nbytes, cache_ref=cache_ref, incarnation=engine
    )
    lengths: list[int] = answer.metadata["lengths"]
    if options.return_key_weights:
        job.staging.outputs = _answered(job.staging.outputs, options, max(lengths))
    reads: list[int] = answer.metadata.pop("reads", lengths)
    for one, length, read in zip(ids, lengths, reads, strict=True):
        service.cache_lengths[one.serial] = length, read
        service.cache_lengths.move_to_end(one.serial)
    while len(service.cache_lengths) > REMEMBERED:
        service.cache_lengths.popitem(last=False)
    assert request.permit is not None  # set by `carry_out`
    request.permit.settle(plan.rates.price(lengths, sum(reads)))
    return job, answer


async def _with_key_weights(
    request: RouteRequest, message: TensorMessage, plan: _Plan, call: _CacheCall, ids: Sequence[CacheId],
    text: list[TensorInfo],
) -> tuple[Layout, list[TensorInfo]]:  # fmt: skip
    """Return the layout and the outputs as text of a call that returns key weights. It reserves memory for all keys.

    The caches' lengths are asked of their engine, unless the call says where it writes. Raises Refusal.
    """
    spec, outputs = plan.spec, dict(plan.spec.outputs)
    del outputs["key_weights"]
    if request.permit is None:
        admit(request, Layout.of(message.inputs, outputs).nbytes)
    ends = call.cache_options.at or await _lengths(request, ids, call.cache_options.layer)
    new = spec.q_len if any(name == "k" for name, _ in message.inputs) else 0
    outputs["key_weights"] = key_weights_info(spec, max(ends) + new)
    assert request.permit is not None
    request.permit.hold(outputs["key_weights"].nbytes)
    if text:
        text = [info for name, info in outputs.items() if name != "lse" or call.options.return_lse]
    return Layout.of(message.inputs, outputs), text


async def _lengths(request: RouteRequest, ids: Sequence[CacheId], layer: int) -> list[int]:
    """Return the present lengths of a layer of caches. Raises Refusal and ClientGoneError."""
    look = CacheCall(request.caller.name, LookAtCaches(), tuple([one.serial for one in ids]))
    staging, kind = stage(request, Layout.of([], {})), partial(Job[CacheCall], incarnation=ids[0].incarnation)
    return [
        one.lengths[layer] for one in (await submit(request, make_job(request, look, staging, LITTLE, kind))).caches
    ]


def _answered(outputs: Mapping[str, Place], options: Options, keys: int) -> dict[str, Place]:
    """Return the outputs that a caller asked for. The key weights are those of `keys` keys, one row after another."""
    named = {name: place for name, place in outputs.items() if name != "lse" or options.return_lse}
    place = named["key_weights"]
    shape = (*place.shape[:-1], keys)
    named["key_weights"] = place._replace(shape=shape, size=TensorInfo(place.dtype, shape).nbytes)
    return named


def _layer(cache_options: CacheOptions, ids: Sequence[CacheId]) -> LayerShape:
    """Return the shape of the layer, which must be the same in all caches of the call. Raises Refusal 422."""
    if cache_options.layer >= (layers := ids[0].shape.layers):
        many = f"{layers} layer{'' if layers == 1 else 's'}"
        raise invalid([("layer", f"{cache_options.layer} does not exist: each cache has {many}, from 0")])
    layer = ids[0].layer(cache_options.layer)
    if any(one.shape.layers <= cache_options.layer or one.layer(cache_options.layer) != layer for one in ids[1:]):
        raise invalid([("caches", "have different shapes or dtypes in this layer")])
    return layer


def _seed_of(key: str, cache_options: CacheOptions) -> int:
    """Return a dropout seed of 53 bits that is the same when a write is repeated, so that the answers are equal."""
    text = json.dumps([key, cache_options.layer, *cache_options.caches])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 11


class _Rates(NamedTuple):
    """The cost of a call, as a function of its caches' lengths."""

    spec: Spec
    queries: int  # number of queries in each sequence, or their mean, rounded up
    batch: int  # number of sequences
    call: float  # seconds of a call without keys
    pair: float  # seconds for each pair of a query and a key
    key: float  # seconds for reading each key and its value

    @classmethod
    def of(cls, spec: Spec, backend: str, device: DeviceInfo, width: int) -> _Rates:
        """Return the rates on a backend. `width` is the number of bytes of each number in the caches."""
        queries = spec.q_len if not spec.ragged else -(-spec.q_len // max(spec.batch, 1))
        row = spec.kv_heads * (spec.head_dim + spec.value_dim) * width

        def seconds(pairs: int) -> float:
            return seconds_of(spec, device.rates[backend], Extent(spec.batch, min(spec.batch, 1), pairs))

        call = seconds(0)
        key = READ_SECONDS * row if device.name == "cpu" else 0.0
        return cls(spec, queries, spec.batch, call, (seconds(_MANY) - call) / _MANY, key)

    def price(self, lengths: Sequence[int], reads: int) -> Price:
        """Return the cost with caches of these lengths. `reads` counts the keys to read; shared keys count once."""
        pairs = self.queries * (sum(lengths) + self.batch * self.queries)
        seconds = self.call + self.pair * pairs + self.key * reads
        return Price(min(flops_of(self.spec, pairs), MOST_FLOPS), seconds)


class _Plan(NamedTuple):
    """The plan of a call over caches whose layer has the shape `layer`, on `device`."""

    spec: Spec
    options: Raw
    left: int  # with one query per sequence: the number of earlier keys that it attends to; −1 for all
    backend: str
    layout: Layout
    rates: _Rates
    layer: LayerShape
    device: DeviceInfo


class _CacheCall(NamedTuple):
    cache_options: CacheOptions
    options: Options


def _call(message: TensorMessage) -> _CacheCall:
    """Return the checked options of a call. `message.derived` caches them for messages with the same head.

    Raises Refusal 422.
    """
    if message.derived is None:
        return _options(message)
    if (call := message.derived.get(_CALL)) is None:
        call = message.derived[_CALL] = _options(message)
    return cast(_CacheCall, call)


def _plan(message: TensorMessage, call: _CacheCall, layer: LayerShape, device: DeviceInfo) -> _Plan:
    """Return the plan of a call. `message.derived` caches it if it also contains `call`. Raises Refusal 422."""
    derived = message.derived if message.derived is not None and message.derived.get(_CALL) is call else {}
    plan: _Plan | None = derived.get(_PLAN)
    if plan is None or plan.device is not device or plan.layer != layer:
        inputs, count = tuple(message.inputs), len(call.cache_options.caches)
        with refuse_invalid():
            spec, left, backend = _problem(inputs, call.options, layer, count, device.choices)
        rates = _Rates.of(spec, backend, device, ITEMSIZE["float32" if layer.quantized else layer.dtype])
        options, layout = pack_options(spec.options), Layout.of(inputs, spec.outputs)
        plan = derived[_PLAN] = _Plan(spec, options, left, backend, layout, rates, layer, device)
    return plan


@lru_cache(256)  # a model repeats few combinations of shapes and options
def _problem(
    inputs: tuple[tuple[str, TensorInfo], ...], options: Options, layer: LayerShape, caches: int, available: Backends
) -> tuple[Spec, int, str]:  # fmt: skip
    """Return the problem for the backend, `_Plan.left`, and the backend's name. Raises ProblemError."""
    infos = dict(inputs)
    spec = plan_cached(infos, options, layer, caches)
    options, left = _for_single_queries(spec)
    if options.return_key_weights:  # the engine computes them from lse
        options = replace(options, return_lse=True)
    spec = plan_cached(infos, options, layer, caches)
    return spec, left, choose_backend(spec, available)


@refuse_invalid()
def _options(message: TensorMessage) -> _CacheCall:
    options = message.options()
    cache_options = CacheOptions.read(options)
    if refused := saved.refused(options):
        raise invalid(refused)
    plain = saved.plain({name: value for name, value in options.items() if name not in CACHE_OPTIONS})
    return _CacheCall(cache_options, read_options(plain))


def _for_single_queries(spec: Spec) -> tuple[Options, int]:
    """Return the options for the backend, and the number of earlier keys that each query attends to; −1 for all.

    If each sequence has one query, a window is a range of keys. The engine then passes only these keys to the backend,
    so the returned options have no window and are not causal. For other calls, return their own options, and −1.
    """
    options = spec.options
    one = not spec.ragged and spec.q_len == 1 and options.causal_alignment == "bottom_right"
    if not one or options.dropout_p or spec.has("attn_mask") or spec.has("block_mask"):
        return options, -1
    return replace(options, window=(-1, -1), causal=False), options.window[0]


def set_replica_header(request: RouteRequest) -> None:
    """Set the answer's X-Flashpoint-Replica to the request's value if it is valid, else to this replica's name.

    Load balancers route by the field, so a caller must get the value back that led to this replica.
    """
    sent = request.headers.get("x-flashpoint-replica", "")
    request.exchange.replica = sent if NAME.fullmatch(sent) else request.service.cache_ids.replica


async def found_caches(request: RouteRequest, texts: Sequence[str], fields: Sequence[str] = ()) -> list[CacheId]:
    """Return the decoded ids of caches, which must all be on one engine of this replica.

    Errors name a cache by its entry in `fields`; without `fields`, as `caches.0`, `caches.1` and so on. Raises Refusal
    404, 410, 421, 422 and 503.
    """
    service, owner = request.service, request.caller.name
    ids: list[CacheId | None] = []
    async for some in in_turns(texts):
        ids += [service.cache_ids.read(owner, text) if len(text) <= ID_LENGTH else None for text in some]
    own_replica = service.cache_ids.replica
    only = ids[0] if len(ids) == 1 else None
    if only is not None and only.replica == own_replica and service.engine.holder(only.incarnation):
        return [only]  # most calls end here: one valid cache
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
            request.exchange.replica = next(one.replica for one in known if one.replica != own_replica)
        raise Refusal(code, detail, errors=errors)
    if len({one.incarnation for one in known}) > 1:
        raise invalid([("caches", "are on different engines: create them with one call, with `beside`, or by a fork")])
    return known


def cache_count(request: RouteRequest) -> int | None:
    """Return the maximum number of the caller's caches and saved forwards; None without a quota."""
    return None if request.caller.quota is None else request.caller.quota.cache_count


def cache_quota(request: RouteRequest) -> int | None:
    """Return the caller's limit in bytes for its caches and saved forwards; None without a quota."""
    return None if request.caller.quota is None else request.caller.quota.cache_bytes
