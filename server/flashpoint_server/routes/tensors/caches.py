"""/caches: create, list, describe, append to, fork, truncate, renew, read and delete KV caches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel
from starlette.routing import Route as StarletteRoute

from flashpoint_contract import wire
from flashpoint_contract.caches import MOST_TOKENS
from flashpoint_contract.options import LAYOUTS
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.access.cache_ids import MOST_SIZES, CacheId
from flashpoint_server.formats.codec import in_turns
from flashpoint_server.formats.message import read_model
from flashpoint_server.formats.negotiation import binary_format, check_json, request_format
from flashpoint_server.http.request import Request
from flashpoint_server.ipc import bodies
from flashpoint_server.ipc.bodies import CacheCall, CacheOperation, CacheShape
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import CacheRecord
from flashpoint_server.ipc.price import LITTLE
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.compute.cached_attention import (
    cache_count,
    cache_quota,
    found_caches,
    set_replica_header,
)
from flashpoint_server.routes.pipeline import (
    Handler,
    Route,
    admit,
    begin,
    idempotency_key,
    read,
    reply,
    stage,
    submit,
)
from flashpoint_server.routes.tensors.cache_schema import CacheRequest, DeleteRequest, ForkRequest, TruncateRequest
from flashpoint_server.service import Service

REQUEST_LIMIT = 8 << 20  # maximum bytes of a JSON body; enough for thousands of ids
MOST_MADE = 1 << 17  # maximum number of layers in all caches that one call creates
PAGE, MOST_LISTED = 100, 1000  # default and maximum number of caches in an answer of GET /caches
_CURSOR = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def routes(service: Service) -> list[StarletteRoute]:
    """Return the routes of /caches."""
    return [
        route(service, "POST", "/caches", create),
        route(service, "GET", "/caches", listed),
        route(service, "POST", "/caches/fork", fork),
        route(service, "POST", "/caches/delete", delete_many),
        route(service, "GET", "/caches/{id}", look),
        route(service, "DELETE", "/caches/{id}", delete),
        route(service, "POST", "/caches/{id}/append", append),
        route(service, "POST", "/caches/{id}/truncate", truncate),
        route(service, "POST", "/caches/{id}/renew", renew),
        route(service, "GET", "/caches/{id}/tensors", tensors),
    ]


def route(service: Service, method: str, path: str, handle: Handler) -> StarletteRoute:
    """Return the route of a call about caches or saved forwards."""
    return StarletteRoute(path, Route(service, partial(_served, handle=handle)), methods=[method])


async def _served(service: Service, request: Request, handle: Handler) -> None:
    service.authorize(request, "attention")
    if not service.settings.cache_bytes:
        raise Refusal("not_found", "this server has no caches and saved forwards: --cache-bytes is 0")
    set_replica_header(service, request)
    begin(service, request)
    await handle(service, request)


async def create(service: Service, request: Request) -> None:
    cache_request = await _read(service, request, CacheRequest)
    n = cache_request.layers
    kv_heads, head_dim = _each("kv_heads", cache_request.kv_heads, n), _each("head_dim", cache_request.head_dim, n)
    value_dim = head_dim if cache_request.value_dim is None else _each("value_dim", cache_request.value_dim, n)
    _check_made("count", n * cache_request.count)
    if len(set(zip(kv_heads, head_dim, value_dim, strict=True))) > MOST_SIZES:
        raise invalid([("layers", f"may have at most {MOST_SIZES} different sizes")])
    shape = CacheShape(tuple(kv_heads), tuple(head_dim), tuple(value_dim), cache_request.dtype)
    keep, beside, number = _each("keep", cache_request.keep, n), cache_request.beside, None
    if beside is not None:
        (neighbour,) = await found_caches(service, request, [beside], ["beside"])
        incarnation, number = neighbour.incarnation, neighbour.serial
    else:
        incarnation = _engine_for(service, request)
    made = bodies.CreateCaches(shape, cache_request.count, cache_request.max_length, keep, cache_request.ttl_s, number)
    records = await _ask(service, request, incarnation, made)
    await send_list(request, 201, "caches", await _described(service, request, incarnation, records))


async def listed(service: Service, request: Request) -> None:
    """Answer with a page of the caller's caches: engine by engine, each in the order of creation."""
    limit, start, after = page_of(request)
    every: list[dict[str, Any]] = []
    for incarnation in sorted(service.engine.incarnations()):
        if incarnation < start:
            continue
        page = bodies.ListCaches(after if incarnation == start else 0, limit + 1 - len(every))
        records = await _ask(service, request, incarnation, page)
        if len(records) == page.limit:  # there is one more than the page has
            records = records[:-1]
            every += await _described(service, request, incarnation, records)
            last = incarnation, records[-1].serial if records else page.after
            await send_list(request, 200, "caches", every, next=f"{last[0]}-{last[1]}")
            return
        every += await _described(service, request, incarnation, records)
    await send_list(request, 200, "caches", every)


def page_of(request: Request) -> tuple[int, int, int]:
    """Return `limit`, and the engine and the serial in `after`, of a query for a page of a list. Raises Refusal 422."""
    given = parse_qs(request.query, keep_blank_values=True)
    if unknown := [name for name in given if name not in ("limit", "after")]:
        raise invalid([(name, "unknown parameter; known are limit and after") for name in unknown])
    limit, after = given.get("limit", [f"{PAGE}"])[-1], given.get("after", ["0-0"])[-1]
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= MOST_LISTED):
        raise invalid([("limit", f"must be an integer from 1 to {MOST_LISTED}")])
    if (place := _CURSOR.fullmatch(after)) is None:
        raise invalid([("after", "must be the `next` of an earlier answer")])
    return int(limit), int(place[1]), int(place[2])


async def look(service: Service, request: Request) -> None:
    await send_json(
        request, 200, await _ask_about(service, request, await _named(service, request), bodies.LookAtCaches())
    )


async def fork(service: Service, request: Request) -> None:
    fork_request = await _read(service, request, ForkRequest)
    if fork_request.lengths is not None and len(fork_request.lengths) != len(fork_request.caches):
        raise invalid([("lengths", f"has {len(fork_request.lengths)} numbers for {len(fork_request.caches)} caches")])
    fields = [f"{name}.{n}" for name in ("caches", "free") for n in range(len(getattr(fork_request, name)))]
    ids = await found_caches(service, request, [*fork_request.caches, *fork_request.free], fields)
    _check_made("caches", sum(one.shape.layers for one in ids[: len(fork_request.caches)]))
    unique = {one.serial: one for one in ids}
    places = {serial: place for place, serial in enumerate(unique)}
    copies = bodies.ForkCaches([places[one.serial] for one in ids], len(fork_request.caches), fork_request.lengths)
    records = await _ask(service, request, ids[0].incarnation, copies, list(unique.values()))
    await send_list(request, 201, "caches", await _described(service, request, ids[0].incarnation, records))


def _check_made(field: str, layers: int) -> None:
    """Raise Refusal 422 if a call would create more than MOST_MADE layers: other requests would wait too long."""
    if layers > MOST_MADE:
        raise invalid([(field, f"the new caches have {layers} layers, over the limit of {MOST_MADE} for one call")])


async def delete(service: Service, request: Request) -> None:
    one = await _named(service, request)
    await _ask(service, request, one.incarnation, bodies.DeleteCaches(), [one])
    await send_json(request, 204)


async def delete_many(service: Service, request: Request) -> None:
    delete_request = await _read(service, request, DeleteRequest)
    ids = await found_caches(service, request, delete_request.caches)
    await _ask(service, request, ids[0].incarnation, bodies.DeleteCaches(), ids)
    await send_json(request, 204)


async def truncate(service: Service, request: Request) -> None:
    one = await _named(service, request)
    truncate_request = await _read(service, request, TruncateRequest)
    await send_json(
        request, 200, await _ask_about(service, request, one, bodies.TruncateCache(truncate_request.length))
    )


async def renew(service: Service, request: Request) -> None:
    document = await _ask_about(service, request, await _named(service, request), bodies.RenewCaches())
    await send_json(request, 200, document | {"expires_in_s": document["ttl_s"]})


async def append(service: Service, request: Request) -> None:
    """Append tokens to a layer, and answer with the layer's new length."""
    one = await _named(service, request)
    given = request_format(request.headers)
    message = await read(service, request, given)
    infos, options = dict(message.inputs), dict(message.options)
    layout, layer, at = options.pop("layout", "bhsd"), options.pop("layer", 0), options.pop("at", None)
    errors = [(name, "is not an option of this call: use layout, layer and at") for name in options]
    errors += [(name, "is not a tensor of this call: send k and v") for name in infos if name not in ("k", "v")]
    errors += [(name, "missing") for name in ("k", "v") if name not in infos]
    if layout not in LAYOUTS:
        errors.append(("layout", f"must be one of {', '.join(LAYOUTS)}"))
    if type(layer) is not int or not 0 <= layer < one.shape.layers:
        errors.append(("layer", f"must be an integer from 0 to {one.shape.layers - 1}"))
    if at is not None and not (type(at) is int and 0 <= at < MOST_TOKENS):
        errors.append(("at", f"must be a position, from 0 to {MOST_TOKENS - 1}"))
    if errors:
        raise invalid(errors)
    shapes = _token_shapes(infos, one, layer, layout)
    if not request.inside:
        admit(service, request, sum(info.nbytes for info in infos.values()))
    service.admission.charge(request, LITTLE, request.body.deadline, service.engine.pace)
    job = stage(service, request, Layout.of(message.inputs, {}))
    await message.receive(request, job.views(job.inputs))
    # the engine gets the shapes of one sequence, without a batch dimension of 1
    job.inputs = bodies.with_shapes(job.inputs, shapes)
    (record,) = await _ask(service, request, one.incarnation, bodies.AppendTokens(layout, layer, at), [one], job)
    await send_json(request, 200, {"length": record.lengths[layer]})


def _token_shapes(infos: Mapping[str, TensorInfo], one: CacheId, layer: int, layout: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of k and v of one sequence, without a batch: (Hk,S,D) or (S,Hk,D). Raises Refusal 422."""
    sizes, errors, shapes, count = one.layer(layer), [], {}, None
    for name, dim in (("k", sizes.head_dim), ("v", sizes.value_dim)):
        info = infos[name]
        shape = info.shape[1:] if len(info.shape) == 4 and info.shape[0] == 1 and layout != "thd" else info.shape
        if len(shape) == 2 and sizes.kv_heads == 1:
            shape = (1, *shape) if layout == "bhsd" else (shape[0], 1, shape[1])
        heads, length = (0, 1) if layout == "bhsd" else (1, 0)
        right = len(shape) == 3 and shape[heads] == sizes.kv_heads and shape[2] == dim and info.dtype in sizes.taken
        if not right or (count is not None and shape[length] != count):
            due = f"({sizes.kv_heads}, S, {dim})" if layout == "bhsd" else f"(S, {sizes.kv_heads}, {dim})"
            taken = " or ".join(sizes.taken)
            errors.append((name, f"is {info.dtype} of {list(info.shape)}, not {taken} of {due} with one S for k and v"))
        else:
            count, shapes[name] = shape[length], shape
    if errors:
        raise invalid(errors)
    return shapes


async def tensors(service: Service, request: Request) -> None:
    """Answer with k and v of a layer, in safetensors; for an 8-bit cache, dequantized to float32, and the scales."""
    one = await _named(service, request)
    layer = _layer(request, one)
    answers = binary_format(request.headers)
    (record,) = await _ask(service, request, one.incarnation, bodies.LookAtCaches(), [one])
    first, length, sizes = record.firsts[layer], record.lengths[layer], one.layer(layer)
    count, dtype = length - first, "float32" if sizes.quantized else sizes.dtype
    outputs = {
        name: TensorInfo(dtype, (sizes.kv_heads, count, dim))
        for name, dim in (("k", sizes.head_dim), ("v", sizes.value_dim))
    }
    if sizes.quantized:
        outputs |= {name: TensorInfo(dtype, (sizes.kv_heads, count)) for name in ("k_scale", "v_scale")}
    service.admission.hold(request, sum(info.nbytes for info in outputs.values()))
    job = stage(service, request, Layout.of([], outputs))
    await _ask(service, request, one.incarnation, bodies.ExportTokens(layer, first, length), [one], job)
    listed_ = [(name, info.dtype, (1, *info.shape)) for name, info in outputs.items()]
    metadata = wire.encode_options({"first": first, "length": length})
    views = [view for view in job.views(job.outputs).values() if len(view)]
    await reply(service, request, [wire.build_head(listed_, metadata), *views], {"content-type": answers.media_type})


def _layer(request: Request, one: CacheId) -> int:
    """Return the layer in the query string, by default 0. Raises Refusal 422."""
    given = parse_qs(request.query, keep_blank_values=True)
    if unknown := [name for name in given if name != "layer"]:
        raise invalid([(name, "unknown parameter; known is layer") for name in unknown])
    text = given.get("layer", ["0"])[-1]
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < one.shape.layers):
        raise invalid([("layer", f"must be an integer from 0 to {one.shape.layers - 1}")])
    return int(text)


async def _read(service: Service, request: Request, model: type[M]) -> M:
    check_json(request.headers)
    return await read_model(request.body, model, REQUEST_LIMIT, service.codec)


async def _named(service: Service, request: Request) -> CacheId:
    """Return the decoded id in the path. Raises Refusal 404, 410, 421 and 503."""
    return (await found_caches(service, request, [request.path.split("/")[2]]))[0]


def _engine_for(service: Service, request: Request) -> int:
    """Return the incarnation (unique number) of the engine that shall create new caches. Raises Refusal 503.

    The idempotency key determines the engine, so that a repeated call reaches the same one. Without a key, it is the
    engine with the fewest stored bytes.
    """
    engines = service.engine.incarnations()
    if not engines:
        raise Refusal("not_ready", "no engine is ready")
    if key := idempotency_key(request):
        return sorted(engines)[sum(key.encode()) % len(engines)]
    return service.engine.least_loaded(lambda engine: engine.holding.total).incarnation


async def _ask(
    service: Service,
    request: Request,
    incarnation: int,
    operation: CacheOperation,
    ids: Sequence[CacheId] = (),
    job: Job | None = None,
) -> Sequence[CacheRecord]:
    """Send an operation on the caches `ids` to an engine, and return the records of caches in its answer.

    `job` has the memory of the operation's tensors, if any.

    Raises Refusal and ClientGoneError.
    """
    serials = tuple([one.serial for one in ids])
    key = idempotency_key(request) if request.method in ("POST", "DELETE") else ""
    call = CacheCall(request.caller.name, operation, serials, key, cache_quota(request), cache_count(request))
    return (await submit(service, request, job or stage_nothing(service, request), call, LITTLE, incarnation)).caches


async def _ask_about(service: Service, request: Request, one: CacheId, operation: CacheOperation) -> dict[str, Any]:
    """Send an operation on one cache to its engine. Return the cache's description. Raises like `_ask`."""
    return (
        await _described(
            service, request, one.incarnation, await _ask(service, request, one.incarnation, operation, [one])
        )
    )[0]


def stage_nothing(service: Service, request: Request) -> Job:
    """Return a job without tensors; admit the request if it is not admitted yet. Raises Refusal 429."""
    if not request.inside:
        admit(service, request, 0)
    return stage(service, request, Layout.of([], {}))


async def _described(
    service: Service, request: Request, incarnation: int, records: Sequence[CacheRecord]
) -> list[dict[str, Any]]:
    owner, ids = request.caller.name, service.cache_ids
    described: list[dict[str, Any]] = []
    async for some in in_turns(records):
        described += [
            {
                "id": ids.make(owner, incarnation, one.serial, one.shape),
                "layers": one.shape.layers,
                "kv_heads": _one(one.shape.kv_heads),
                "head_dim": _one(one.shape.head_dim),
                "value_dim": _one(one.shape.value_dim),
                "dtype": one.shape.dtype,
                "max_length": one.max_length,
                "keep": _one(one.keep),
                "ttl_s": one.ttl,
                "lengths": one.lengths,
                "bytes": one.nbytes,
                "expires_in_s": round(one.expires_in, 3),
            }
            for one in some
        ]
    return described


def _each(name: str, value: T | list[T], layers: int) -> list[T]:
    """Return a list with a value for each layer. Raises Refusal 422."""
    if not isinstance(value, list):
        return [value] * layers
    if len(value) != layers:
        raise invalid([(name, f"has {len(value)} values for {layers} layer{'' if layers == 1 else 's'}")])
    return value


def _one(values: Sequence[T]) -> T | list[T]:
    """Return the common value of all layers, or the list if they differ."""
    return values[0] if len(set(values)) == 1 else list(values)


async def send_json(request: Request, status: int, document: Mapping[str, Any] | None = None) -> None:
    """Send an answer with a JSON document, or without a body if `document` is None."""
    await _send(request, status, None if document is None else json_text(document).encode())


async def send_list(request: Request, status: int, name: str, rows: Sequence[Mapping[str, Any]], **fields: Any) -> None:
    """Send an answer with a JSON object: a list `name`, which may be long, and other `fields`."""
    texts: list[str] = []
    async for some in in_turns(rows):
        texts += map(json_text, some)
    others = "".join(f",{json_text(field)}:{json_text(value)}" for field, value in fields.items())
    await _send(request, status, f'{{"{name}":[{",".join(texts)}]{others}}}'.encode())


json_text = json.JSONEncoder(separators=(",", ":")).encode


async def _send(request: Request, status: int, body: bytes | None) -> None:
    """Send an answer with a body in JSON, or without one."""
    headers = [(b"content-length", b"%d" % len(body or b""))] if status != 204 else []
    if body is not None:
        headers.append((b"content-type", jsonwire.MEDIA_TYPE.encode()))
    await request.send({"type": "http.response.start", "status": status, "headers": headers})
    await request.send({"type": "http.response.body", "body": body or b"", "more_body": False})
