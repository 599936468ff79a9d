"""POST /attention with `save` stores the forward pass on the server; POST /attention/grad with `saved` uses it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashpoint_contract.saved import (
    SAVED_OPTIONS,
    plain,
    recalled_options,
    refused_beside,
    saved_bytes,
    saved_tensors,
)
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_kernels.problems.cost import extent_of, flops_of, seconds_of
from flashpoint_server.access.saved_ids import SavedId, SavedIds
from flashpoint_server.formats.message import TensorMessage
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.bodies import Recall, Save
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import MOST_FLOPS, Price
from flashpoint_server.plan import Plan, apart, refuse_invalid
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.compute.cached_attention import cache_count, cache_quota, set_replica_header
from flashpoint_server.routes.pipeline import Numbers, carry_out
from flashpoint_server.service import Service

SEED_BITS = 53  # bits of a seed that the server draws: float64 represents it exactly


async def compute_saving(service: Service, request: Request, message: TensorMessage, numbers: Numbers) -> Job:
    """Compute attention and save it; `saved` in the answer's metadata is the id. Raises Refusal and ClientGoneError."""
    set_replica_header(service, request)
    options, seed = None, message.seed
    if message.checked.dropout_p and seed is None:
        options, seed = replace(message.checked, dropout_seed=0), secrets.randbits(SEED_BITS)
    plan = service.plans.of(message, request.device, options=options)
    owner, quota, most = request.caller.name, cache_quota(request), cache_count(request)
    _check_memory(service, size := saved_bytes(plan.spec), quota)
    head = b""

    def save(index: Mapping[str, Any]) -> Save:
        nonlocal head
        head = SavedIds.head(plan.spec, seed, extent_of(plan.spec, index) if index else None)
        return Save(owner, quota, size, head, most)

    job = await carry_out(service, request, message, plan, numbers, plan.price, seed=seed, saved=save)
    engine, serial = job.answered_by, job.done.metadata["saved"]

    def left() -> None:
        if request.error is not None or request.code is not None:  # the caller did not get the id
            service.engine.forget_saved(engine, serial)

    request.ends.append(left)
    job.done.metadata["saved"] = service.saved_ids.make(owner, engine, serial, head)
    return job


def _check_memory(service: Service, size: int, quota: int | None) -> None:
    """Raise Refusal 413 or 429 if the memory or the key's quota has no room for a forward of `size` bytes.

    This is called before the body is read.
    """
    engines, limit = service.engine, service.settings.cache_bytes
    if size > limit:
        raise Refusal(
            "work_too_large", f"a saved forward of {in_bytes(size)} exceeds the server's limit of {in_bytes(limit)}"
        )
    if quota is not None and size > quota:
        raise Refusal(
            "key_limit", f"a saved forward of {in_bytes(size)} exceeds the API key's limit of {in_bytes(quota)}"
        )
    if (used := engines.least_loaded(lambda engine: engine.holding.total).holding.total) + size > limit:
        raise Refusal(
            "cache_memory",
            f"{in_bytes(used)} of {in_bytes(limit)} are in use, and this call needs {in_bytes(size)} more",
        )


async def compute_recalled(service: Service, request: Request, message: TensorMessage, numbers: Numbers) -> Job:
    """Compute the gradients of a saved forward. Raises Refusal and ClientGoneError."""
    options, infos = dict(message.options), dict(message.inputs)
    if options.get("save") is False:
        del options["save"]
    if refused := refused_beside(infos, options):
        raise invalid(refused)
    one = found_saved(service, request, options["saved"])
    with refuse_invalid():
        chosen = AttentionOptions.model_validate(plain(options)).model_dump(exclude_unset=True)
        recalled, seed = apart(recalled_options(one.forward, chosen))
    tensors = tuple(saved_tensors(one.forward).items())
    plan = service.plans.of(message, request.device, tensors, recalled)
    recall = Recall(request.caller.name, one.serial)
    engine: dict[str, Any] = {"incarnation": one.incarnation, "lost": "saved_lost"}
    price = _price(one, plan, request.device)
    return await carry_out(service, request, message, plan, numbers, price, seed=seed, saved=lambda _: recall, **engine)


def _price(one: SavedId, plan: Plan, device: DeviceInfo) -> Price:
    """Return the cost of the gradients. It is exact if the id has the forward's number of (query, key) pairs."""
    if one.extent is None:
        return plan.price
    flops = flops_of(plan.spec, one.extent.pairs)
    return Price(min(flops, MOST_FLOPS), seconds_of(plan.spec, device.rates[plan.backend], one.extent))


def found_saved(service: Service, request: Request, text: object) -> SavedId:
    """Return the decoded id of a saved forward of the caller. Raises Refusal 404, 410, 421, 422 and 503."""
    if not isinstance(text, str):
        raise invalid([("saved", f"must be a string: {SAVED_OPTIONS['saved'].text}")])
    one = service.saved_ids.read(request.caller.name, text)
    if one is None:
        raise Refusal("saved_not_found", "this saved forward does not exist, or belongs to another API key")
    set_replica_header(service, request)
    if one.replica != service.cache_ids.replica:
        request.replica = one.replica
        detail = f"replica {one.replica!r} holds the saved forward: send X-Flashpoint-Replica: {one.replica}"
        raise Refusal("cache_elsewhere", detail)
    if not service.engine.holder(one.incarnation):
        raise Refusal("saved_lost", "the engine that held the saved forward restarted")
    return one
