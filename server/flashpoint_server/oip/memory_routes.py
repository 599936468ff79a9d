"""/v2/systemsharedmemory: callers on this host register their shared memory (see ipc/regions.py).

Triton's clients begin by unregistering everything. So, as in Triton, unregistering an unknown region does nothing, and
with shared memory off there are no regions. CUDA shared memory is always off.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from flashpoint_server.formats.message import read_model
from flashpoint_server.http.body import RequestBody
from flashpoint_server.http.request import request_of
from flashpoint_server.ipc.regions import Region, provide
from flashpoint_server.oip.schema import TAG, errors
from flashpoint_server.refusal import Refusal
from flashpoint_server.service import Service

_OFF = "shared memory is off on this server: see --shared-memory-bytes"
REQUEST_LIMIT = 4096  # maximum bytes of a request's body; the field `key` in it has at most 256 characters


class Registration(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    key: str = Field(description="Name of the POSIX shared memory object.")
    offset: int = Field(0, ge=0, description="Offset of the region in the object, in bytes.")
    byte_size: int = Field(gt=0)


class RegionStatus(BaseModel):
    """A region. `key` is always empty, because everybody who knows it could open the object."""

    name: str
    key: str = ""
    offset: int
    byte_size: int


class Nothing(BaseModel):
    """`{}`"""


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v2/systemsharedmemory", tags=[TAG], include_in_schema=service.regions.limit > 0)
    schema = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": Registration.model_json_schema()}}}
    }

    def admit(request: Request) -> str:
        return _owner(service, request)

    def check_on() -> None:
        """Raise Refusal 404 if shared memory is off."""
        if not service.regions.limit:
            raise Refusal("not_found", _OFF)

    locked = ("unauthorized", "forbidden", "cross_site")
    unknown = "region 'mine' is not registered"

    @routes.get("/status", summary="List the regions of your key", responses=errors(*locked))
    async def all_status(request: Request) -> list[RegionStatus]:
        return [_status(region) for region in service.regions.all(admit(request))]

    @routes.get(
        "/region/{name}/status", summary="Describe a region", responses=errors(*locked, "not_found", not_found=unknown)
    )
    async def status(request: Request, name: str) -> list[RegionStatus]:
        owner = admit(request)
        check_on()
        return [_status(service.regions.find(owner, name))]

    wrong = errors(
        *(
            *locked,
            "malformed_body",
            "not_found",
            "body_too_large",
            "work_too_large",
            "invalid_request",
            "out_of_memory",
        ),
        not_found=_OFF,
        invalid_request="key: this server cannot open a shared memory object with this key",
    )

    @routes.post("/region/{name}/register", summary="Register a region", responses=wrong, openapi_extra=schema)
    async def register(request: Request, name: str) -> Nothing:
        owner = admit(request)
        check_on()
        body = RequestBody(request.scope, request.receive, request.headers, service.settings)
        registration = await read_model(body, Registration, REQUEST_LIMIT, service.codec)
        if (end := registration.offset + registration.byte_size) <= service.regions.limit:
            await asyncio.to_thread(provide, registration.key, end)
        service.regions.register(owner, name, registration.key, registration.offset, registration.byte_size)
        return Nothing()

    @routes.post("/region/{name}/unregister", summary="Unregister a region", responses=errors(*locked))
    async def unregister(request: Request, name: str) -> Nothing:
        service.regions.unregister(admit(request), name)
        return Nothing()

    @routes.post("/unregister", summary="Unregister all regions of your key", responses=errors(*locked))
    async def unregister_all(request: Request) -> Nothing:
        service.regions.unregister_all(admit(request))
        return Nothing()

    return routes


def cuda_router(service: Service) -> APIRouter:
    """Return the routes of CUDA shared memory. It is not supported, so there are never any regions."""
    routes = APIRouter(prefix="/v2/cudasharedmemory", tags=[TAG], include_in_schema=False)

    @routes.get("/status")
    async def all_status(request: Request) -> list[RegionStatus]:
        _owner(service, request)
        return []

    @routes.post("/region/{name}/unregister")
    @routes.post("/unregister")
    async def unregister(request: Request) -> Nothing:
        _owner(service, request)
        return Nothing()

    return routes


def _owner(service: Service, request: Request) -> str:
    """Return the name of the caller's key, which owns the regions. Raises Refusal 401 and 403."""
    caller = service.authorize(request_of(request.scope), "admin")
    if "origin" in request.headers:  # sent by a web page, which would act with its viewer's access to this host
        raise Refusal("forbidden", "web pages may not use shared memory")
    return caller.name


def _status(region: Region) -> RegionStatus:
    return RegionStatus(name=region.name, offset=region.offset, byte_size=region.size)
