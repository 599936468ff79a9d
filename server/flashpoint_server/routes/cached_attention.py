"""POST /attention over caches: which engine holds them, what the call is worth, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pydantic import ValidationError

from flashpoint.validation import field_problems
from flashpoint_contract import saved
from flashpoint_contract.caches import CACHE_OPTIONS, CacheOptions, plan_cached
from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import ITEMSIZE, TensorInfo
from flashpoint_kernels.cost import Extent, flops_of, seconds_of
from flashpoint_kernels.support import choose_backend
from flashpoint_server.access.admission import check_size
from flashpoint_server.access.cache_ids import CacheId
from flashpoint_server.formats.message import TensorMessage, read_options, text_bytes
from flashpoint_server.ipc.job import AttentionJob, JobResult
from flashpoint_server.ipc.messages import DeviceInfo, Held
from flashpoint_server.ipc.price import MOST_FLOPS, Price
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import RouteRequest, admit, make_job, stage, submit

READ_SECONDS = 1e-10  # of a byte of keys or values that one core reads
KEY_LENGTH = 128  # characters of an Idempotency-Key
REMEMBERED = 1 << 16  # caches whose lengths are remembered, for the prices of the next calls


async def compute_cached(
    request: RouteRequest, message: TensorMessage, numbers: Callable[[Spec], list[TensorInfo]]
) -> tuple[AttentionJob, JobResult]:
    """Plan, admit, stage and submit attention over caches. Raises Refusal and ClientGoneError."""
    service, body, device = request.service, request.body, request.device
    assert device is not None
    infos = dict(message.inputs)
    asked, options = _options(message)
    ids = found(request, asked.caches)
    if asked.layer >= ids[0].shape.layers:
        raise invalid([("layer", f"{asked.layer} is beyond the {ids[0].shape.layers} layers of the caches")])
    layer = ids[0].layer(asked.layer)
    if any(one.shape.layers <= asked.layer or one.layer(asked.layer) != layer for one in ids):
        raise invalid([("caches", "have layers of different shapes or dtypes")])
    writes = "k" in infos
    if writes and len(set(asked.caches)) < len(asked.caches):
        raise invalid([("caches", "names a cache twice, and the call writes")])
    if asked.at is not None and not writes:
        raise invalid([("at", "is where k and v are written, which are missing")])
    try:
        spec = plan_cached(infos, options, layer, len(ids))
        options, left = _for_single_queries(spec)
        spec = plan_cached(infos, options, layer, len(ids))
        backend = choose_backend(spec, device.backends)
    except ProblemError as error:
        raise invalid(error.errors) from None
    check_size(spec, device.memory, service.settings.sequence_limit)
    text = numbers(spec)
    if (size := sum(info.nbytes for info in text)) > (most := service.settings.json_limit):
        raise Refusal("work_too_large", f"an answer of {size} bytes is over JSON's limit of {most}")
    permit = request.permit or admit(request, sum(info.nbytes for info in infos.values()) + spec.output_bytes)
    if text:
        permit.grow(text_bytes(text))
    known = [service.cache_lengths.get(one.serial, 0) for one in ids]
    permit.charge(_price(spec, backend, device, known), body.deadline, service.engine.pace)
    staging = stage(request, message.inputs, spec.outputs)
    await message.receive(body, staging.views(staging.inputs))
    request.exchange.facts.update(backend=backend, shapes={n: list(i.shape) for n, i in infos.items()})
    caller = request.caller
    assert caller is not None
    held = Held(
        owner=caller.name,
        caches=tuple(one.serial for one in ids),
        shape=(layer.kv_heads, layer.head_dim, layer.value_dim, layer.dtype),
        layer=asked.layer,
        at=asked.at,
        key=idempotency_key(request) if writes else "",
        quota=cache_quota(request),
        left=left,
    )
    kind = partial(AttentionJob, spec=spec, backend=backend, held=held, incarnation=ids[0].incarnation)
    job = make_job(request, kind, staging, permit.price)
    answer = await submit(request, job)
    lengths: list[int] = answer.metadata["lengths"]
    for one, length in zip(ids, lengths, strict=True):
        service.cache_lengths[one.serial] = length
        service.cache_lengths.move_to_end(one.serial)
    while len(service.cache_lengths) > REMEMBERED:
        service.cache_lengths.popitem(last=False)
    permit.settle(_price(spec, backend, device, lengths))
    return job, answer


def _options(message: TensorMessage) -> tuple[CacheOptions, Options]:
    """Return what a message says of caches, and the other options. Raises Refusal 422."""
    said = dict(message.options())
    try:
        asked = CacheOptions.read(said)
        if refused := saved.refused(said):
            raise invalid(refused)
        return asked, read_options(saved.plain({n: value for n, value in said.items() if n not in CACHE_OPTIONS}))
    except ValidationError as error:
        raise invalid(field_problems(error)) from None
    except ProblemError as error:
        raise invalid(error.errors) from None


def _for_single_queries(spec: Spec) -> tuple[Options, int]:
    """Return options that say the same, and how many keys before its own a single query sees; −1 for any.

    The window of one query is a range of keys, which every backend can be given: no diagonal is needed.
    """
    options = spec.options
    one = not spec.ragged and spec.q_len == 1 and options.causal_alignment == "bottom_right"
    if not one or options.dropout_p or "attn_mask" in spec.tensors:
        return options, -1
    return replace(options, window=(-1, -1), causal=False), options.window[0]


def _price(spec: Spec, backend: str, device: DeviceInfo, lengths: Sequence[int]) -> Price:
    """Return the price of a call over caches of these lengths: its products, and the keys that are read."""
    queries = spec.q_len if not spec.ragged else -(-spec.q_len // max(spec.batch, 1))
    pairs = queries * (sum(lengths) + spec.batch * queries)
    row = spec.kv_heads * (spec.head_dim + spec.value_dim) * ITEMSIZE[spec.dtype]
    seconds = seconds_of(spec, device.rates[backend], Extent(spec.batch, min(spec.batch, 1), pairs))
    if device.name == "cpu":
        seconds += READ_SECONDS * sum(lengths) * row
    return Price(min(flops_of(spec, pairs), MOST_FLOPS), seconds)


def found(request: RouteRequest, texts: Sequence[str]) -> list[CacheId]:
    """Return what ids say of caches that one engine holds. Raises Refusal 404, 410, 422 and 503."""
    assert request.caller is not None
    service, owner = request.service, request.caller.name
    ids = [service.cache_ids.read(owner, text) for text in texts]
    errors = []
    for place, one in enumerate(ids):
        if one is None:
            errors.append((f"caches.{place}", "cache_not_found: there is no such cache"))
        elif not service.engine.holder(one.incarnation):
            errors.append((f"caches.{place}", "cache_lost: its engine restarted"))
    if errors:
        code, _, said = errors[0][1].partition(": ")
        raise Refusal(code, said, errors=errors)
    known = [one for one in ids if one is not None]
    if len({one.incarnation for one in known}) > 1:
        raise invalid([("caches", "are on different engines: make them with one call, with `beside`, or by a fork")])
    return known


def idempotency_key(request: RouteRequest) -> str:
    """Return the Idempotency-Key, "" for none. Raises Refusal 422."""
    key = request.headers.get("idempotency-key", "")
    if len(key) > KEY_LENGTH or not key.isprintable():
        raise invalid([("Idempotency-Key", f"must be at most {KEY_LENGTH} printable characters")])
    return key


def cache_quota(request: RouteRequest) -> int | None:
    """Return how many bytes of caches the caller may hold; None for no limit."""
    assert request.caller is not None
    return None if request.caller.quota is None else request.caller.quota.cache_bytes
