"""The gRPC methods other than inference. Each calls the HTTP route that gives the same answer in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from flashpoint_server.oip.models import VERSION, find
from flashpoint_server.refusal import Refusal, invalid

SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"


class Method(NamedTuple):
    """How to make an HTTP request from a gRPC message, and a gRPC message from the JSON of the HTTP answer.

    `unready` is the content of the gRPC message if the HTTP answer has status 503; None makes this status an error.
    """

    verb: str
    path: Callable[[Any], str]
    body: Callable[[Any], bytes] = lambda _: b""
    answer: Callable[[Any], Any] = lambda document: document
    unready: dict[str, Any] | None = None


def _model(below: str = "") -> Callable[[Any], str]:
    """Return a function: (gRPC message) -> path of the model that it names, followed by `below`. Raises Refusal 404."""
    return lambda request: f"/v2/models/{find(request.name, request.version).name}/versions/{VERSION}{below}"


def _statistics(request: Any) -> str:
    return _model("/stats")(request) if request.name else "/v2/models/stats"


def _region(below: str, of_all: bool = True, kind: str = "system") -> Callable[[Any], str]:
    """Return a function: (gRPC message) -> path of the shared memory region that it names, followed by `below`.

    If the message has no name, the path is that of all regions if `of_all`. The function raises Refusal 422.
    """

    def path(request: Any) -> str:
        if "/" in request.name or not (request.name or of_all):
            raise invalid([("name", "must be a name without '/'")])
        return f"/v2/{kind}sharedmemory" + (f"/region/{request.name}{below}" if request.name else below)

    return path


def _regions(regions: Any) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in regions}}


def _registration(request: Any) -> bytes:
    return json.dumps({"key": request.key, "offset": request.offset, "byte_size": request.byte_size}).encode()


def _health(request: Any) -> str:
    if request.service not in ("", SERVICE, HEALTH):
        raise Refusal("not_found", f"service {request.service!r} does not exist")
    return "/health/ready"


METHODS: dict[str, dict[str, Method]] = {
    SERVICE: {
        "ServerLive": Method("GET", lambda _: "/v2/health/live"),
        "ServerReady": Method("GET", lambda _: "/v2/health/ready", unready={"ready": False}),
        "ModelReady": Method("GET", _model("/ready"), unready={"ready": False}),
        "ServerMetadata": Method("GET", lambda _: "/v2"),
        "ModelMetadata": Method("GET", _model()),
        "ModelConfig": Method("GET", _model("/config"), answer=lambda config: {"config": config}),
        "ModelStatistics": Method("GET", _statistics),
        "RepositoryIndex": Method("POST", lambda _: "/v2/repository/index", answer=lambda models: {"models": models}),
        "SystemSharedMemoryStatus": Method("GET", _region("/status"), answer=_regions),
        "SystemSharedMemoryRegister": Method("POST", _region("/register", of_all=False), _registration),
        "SystemSharedMemoryUnregister": Method("POST", _region("/unregister")),
        "CudaSharedMemoryStatus": Method("GET", _region("/status", kind="cuda"), answer=_regions),
        "CudaSharedMemoryUnregister": Method("POST", _region("/unregister", kind="cuda")),
    },
    HEALTH: {
        "Check": Method("GET", _health, answer=lambda _: {"status": "SERVING"}, unready={"status": "NOT_SERVING"}),
    },
}
