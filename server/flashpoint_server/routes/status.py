"""GET /health, /health/live, /health/ready, /info and /metrics."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from flashpoint_contract.tensors import MAX_HEAD_DIM
from flashpoint_kernels.dispatching.support import SUPPORT
from flashpoint_server.config.key_file import RIGHTS
from flashpoint_server.http.request import request_of
from flashpoint_server.observability.metrics import MEDIA_TYPE
from flashpoint_server.observability.observed import versions
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.schema.problem_schema import problems
from flashpoint_server.service import Service

_LOCKED = ("unauthorized", "forbidden", "cross_site")
PROBES = {"/health", "/health/live", "/health/ready"}


class Health(BaseModel):
    status: str = Field(examples=["ok"])


class Overview(Health):
    """The health of the server. `reason` says why it is not ready."""

    live: bool
    ready: bool
    reason: str | None = None


class Device(BaseModel):
    name: str = Field(description="The device's name in PyTorch.", examples=["cuda:0"])
    title: str = Field(examples=["NVIDIA H200"])
    memory: int = Field(description="Memory in bytes.")


class Info(BaseModel):
    """The server and its state. `device` is null and `backends` is empty until the server is ready."""

    name: str = "flashpoint"
    version: str
    versions: dict[str, str] = Field(description="Versions of Python and of the main libraries.")
    device: Device | None
    backends: list[str] = Field(description="Backends, in the order in which `auto` prefers them.")
    kernels: dict[str, str] = Field(
        description="The CPU kernels in C of the backend `cpu`, by the data type of q.",
        examples=[{"bfloat16": "c-amx"}],
    )
    gradient_kernels: dict[str, str] = Field(
        description="The kernels in C of gradients, by the data type of q.", examples=[{"bfloat16": "c-avx512"}]
    )
    kernels_off: dict[str, str] = Field(
        description="The kernels and backends that are switched off, each with the reason.",
        examples=[{"amx.backward": "the setting FLASHPOINT_KERNELS_OFF"}],
    )
    missing: list[str] = Field(
        description="Sentences that say which part is missing on this device, and how to install it."
    )
    options: dict[str, list[str]] = Field(description="The features of each backend.")
    load: dict[str, int] = Field(description="Number of admitted requests, and the bytes of their tensors.")
    caches: dict[str, int] = Field(
        description="Number and bytes of KV caches and of saved forwards, and the limit of each engine in bytes."
    )
    limits: dict[str, int] = Field(description="Limits. Each name contains the unit.")
    rights: list[str] = Field(description="Permissions of the caller's key; all of them if the server has no keys.")


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["status"])

    @routes.get("/health", summary="Check that the process answers, and that it accepts new work")
    async def health() -> Overview:
        """Answer 200 while the process runs, ready or not. A load balancer needs `/health/ready`, which can be 503."""
        try:
            service.check_working()
        except Refusal as refusal:
            return Overview(status="ok", live=True, ready=False, reason=refusal.detail)
        return Overview(status="ok", live=True, ready=True)

    @routes.get("/health/live", summary="Check that the process answers")
    async def live() -> Health:
        return Health(status="ok")

    @routes.get(
        "/health/ready", summary="Check that the server accepts new work", responses=problems("not_ready", "draining")
    )
    async def ready() -> Health:
        """Answer 200 when each backend has agreed with the float64 reference on this device.

        Answer 503 while the server shuts down, or while a signal or a debugger has stopped the engine's process.
        """
        service.check_working()
        return Health(status="ok")

    @routes.get("/info", summary="Describe versions, device, backends, load and limits", responses=problems(*_LOCKED))
    async def info(request: Request) -> Info:
        caller = service.authorize(request_of(request.scope), "info")
        device, settings, holding = service.engine.device, service.settings, service.engine.holding
        backends = list(device.backends) if device else []
        return Info(
            version=version("flashpoint"),
            versions=versions(),
            device=Device(name=device.name, title=device.title, memory=device.memory) if device else None,
            backends=backends,
            kernels=device.kernels if device else {},
            gradient_kernels=device.gradient_kernels if device else {},
            kernels_off=device.kernels_off if device else {},
            missing=[*filter(None, (device.no_triton, device.no_kernels, device.no_gpu))] if device else [],
            options={name: sorted(SUPPORT[name]) for name in backends} if device else {},
            load={"requests": int(sum(service.counts.requests)), "bytes": int(sum(service.counts.bytes))},
            caches={
                "caches": holding.caches,
                "bytes": holding.nbytes,
                "saved": holding.saved,
                "saved_bytes": holding.saved_nbytes,
                "limit_bytes": settings.cache_bytes,
            },
            limits={
                "body_bytes": settings.body_limit,
                "json_bytes": settings.json_limit,
                "head_bytes": settings.head_limit,
                "sequences": settings.sequence_limit,
                "head_dim": MAX_HEAD_DIM,
                "queue_requests": settings.queue_limit,
                "queue_bytes": settings.queue_bytes,
                "queue_flops": settings.queue_flops,
                "queue_seconds": math.ceil(settings.queue_seconds),
                "batch_bytes": settings.batch_bytes,
                "batch_flops": settings.batch_flops,
                "default_timeout_ms": settings.default_timeout_ms,
                "max_timeout_ms": settings.max_timeout_ms,
            },
            rights=[right for right in RIGHTS if right in caller.rights],
        )

    text: dict[int | str, dict[str, Any]] = {
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}
    }

    @routes.get(
        "/metrics",
        summary="Export metrics for Prometheus",
        responses=text | problems(*_LOCKED),
        response_class=Response,
    )
    async def metrics(request: Request) -> Response:
        service.authorize(request_of(request.scope), "metrics")
        service.report()
        return Response(service.metrics.exposition(service.engine.device), media_type=MEDIA_TYPE)

    return routes
