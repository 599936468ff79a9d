"""/saved: list, describe and delete saved forwards: forward passes that the server stores for later gradients."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.routing import Route as StarletteRoute

from flashpoint_contract.saved import saved_tensors
from flashpoint_server.access.saved_ids import SavedId, SavedIds
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.bodies import SavedCall
from flashpoint_server.ipc.messages import MOST_LISTED, SavedRecord
from flashpoint_server.ipc.price import LITTLE
from flashpoint_server.routes.compute.saved_forward import found_saved
from flashpoint_server.routes.pipeline import submit
from flashpoint_server.routes.tensors.caches import route, send_json, send_list, stage_nothing
from flashpoint_server.service import Service


class SavedDescription(BaseModel):
    """A saved forward. `bytes` is the size of its inputs, o and lse; `shapes` are their shapes."""

    model_config = ConfigDict(title="SavedForward")
    id: str
    dtype: str
    shapes: dict[str, list[int]]
    bytes: int
    ttl_s: float
    expires_in_s: float


class SavedList(BaseModel):
    saved: list[SavedDescription]


def routes(service: Service) -> list[StarletteRoute]:
    """Return the routes of /saved."""
    return [
        route(service, "GET", "/saved", listed),
        route(service, "GET", "/saved/{id}", look),
        route(service, "DELETE", "/saved/{id}", delete),
    ]


async def listed(service: Service, request: Request) -> None:
    every = []
    for incarnation in service.engine.incarnations():
        after, more = 0, True
        while more:
            records = await _ask(service, request, incarnation, "list", after=after)
            every += [_described(service, request, incarnation, one) for one in records]
            more = len(records) == MOST_LISTED
            after = records[-1].serial if records else 0
    await send_list(request, 200, "saved", every)


async def look(service: Service, request: Request) -> None:
    one = _named(service, request)
    (record,) = await _ask(service, request, one.incarnation, "look", one.serial)
    await send_json(request, 200, _described(service, request, one.incarnation, record))


async def delete(service: Service, request: Request) -> None:
    one = _named(service, request)
    await _ask(service, request, one.incarnation, "delete", one.serial)
    await send_json(request, 204)


def _named(service: Service, request: Request) -> SavedId:
    return found_saved(service, request, request.path.split("/")[2])


async def _ask(
    service: Service,
    request: Request,
    incarnation: int,
    operation: Literal["list", "look", "delete"],
    *serials: int,
    after: int = 0,
) -> list[SavedRecord]:
    """Send an operation to an engine. Return the saved forwards in its answer. Raises Refusal and ClientGoneError."""
    call = SavedCall(request.caller.name, operation, serials, after)
    return (
        await submit(service, request, stage_nothing(service, request), call, LITTLE, incarnation, "saved_lost")
    ).saved


def _described(service: Service, request: Request, incarnation: int, record: SavedRecord) -> dict[str, Any]:
    forward, _ = SavedIds.read_head(record.head)
    return {
        "id": service.saved_ids.make(request.caller.name, incarnation, record.serial, record.head),
        "dtype": forward.dtype,
        "shapes": {name: list(info.shape) for name, info in saved_tensors(forward).items()},
        "bytes": record.nbytes,
        "ttl_s": record.ttl,
        "expires_in_s": round(record.expires_in, 3),
    }
