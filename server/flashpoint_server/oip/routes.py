"""The routes of /v2 other than inference: health, metadata, configuration, statistics and an index of the models."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from flashpoint_contract.schemas import jsonwire
from flashpoint_server.http.request import request_of
from flashpoint_server.oip import models
from flashpoint_server.oip.models import MODELS, VERSION, Model, ModelMetadata, ServerMetadata
from flashpoint_server.oip.schema import TAG, errors
from flashpoint_server.oip.statistics import model_stats
from flashpoint_server.refusal import Refusal
from flashpoint_server.service import Service

# The OpenAPI description of the path's model name. FastAPI must not check it: an unknown model is a 404, not a 422.
_NAMED = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"enum": [*MODELS]}}]}
EXTENSIONS = ["binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics"]

PROBES = {
    "/v2/health/live",
    "/v2/health/ready",
    *(f"/v2/models/{name}{below}/ready" for name in MODELS for below in ("", f"/versions/{VERSION}")),
}


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class IndexEntry(BaseModel):
    name: str
    version: str
    state: str
    reason: str


def infer_paths(model: Model) -> list[str]:
    return [f"/v2/models/{model.name}/infer", f"/v2/models/{model.name}/versions/{VERSION}/infer"]


def written(refusal: Refusal, _: str) -> tuple[str, bytes]:
    """Return media type and body of an error under /v2: `{"error": …}`."""
    text = json.dumps({"error": refusal.detail}, ensure_ascii=False)
    return jsonwire.MEDIA_TYPE, text.encode("utf-8", "replace")


def router(service: Service) -> APIRouter:
    locked, not_ready = errors("unauthorized", "forbidden", "cross_site"), errors("not_ready", "draining")
    known = errors("not_found", not_found="model 'attentoin' does not exist; use attention or attention_grad")
    routes = APIRouter(prefix="/v2", tags=[TAG])

    extensions = [*EXTENSIONS, *(["system_shared_memory"] if service.regions.limit else [])]

    @routes.get("/health/live", summary="Check that the process answers")
    async def live() -> Live:
        return Live(live=True)

    @routes.get("/health/ready", summary="Check that the server accepts new work", responses=not_ready)
    async def ready() -> Ready:
        service.check_working()
        return Ready(ready=True)

    @routes.get("", summary="Describe the server and its protocol extensions", responses=locked)
    async def server(request: Request) -> ServerMetadata:
        service.authorize(request_of(request.scope), "info")
        return ServerMetadata(name="flashpoint", version=version("flashpoint"), extensions=extensions)

    @routes.post("/repository/index", summary="List the models", responses=locked)
    async def index(request: Request) -> list[IndexEntry]:
        service.authorize(request_of(request.scope), "info")
        state, reason = "READY", ""
        try:
            service.check_working()
        except Refusal as refusal:
            state, reason = "UNAVAILABLE", refusal.detail
        return [IndexEntry(name=name, version=VERSION, state=state, reason=reason) for name in MODELS]

    @routes.get("/models/stats", summary="Get the statistics of all models", responses=locked)
    async def all_stats(request: Request) -> dict[str, Any]:
        service.authorize(request_of(request.scope), "metrics")
        return stats(*MODELS.values())

    @routes.get("/models/{name}/versions/{version}/ready", include_in_schema=False)
    @routes.get(
        "/models/{name}/ready",
        summary="Check that a model accepts new work",
        responses=known | not_ready,
        openapi_extra=_NAMED,
    )
    async def model_ready(request: Request) -> ModelReady:
        model = _model(request)
        service.check_working()
        return ModelReady(name=model.name, ready=True)

    @routes.get("/models/{name}/versions/{version}/config", include_in_schema=False)
    @routes.get(
        "/models/{name}/config",
        summary="Describe a model's configuration, as Triton does",
        responses=locked | known,
        openapi_extra=_NAMED,
    )
    async def config(request: Request) -> dict[str, Any]:
        service.authorize(request_of(request.scope), "info")
        return models.configuration(_model(request), service.settings.max_queue_delay)

    @routes.get("/models/{name}/versions/{version}/stats", include_in_schema=False)
    @routes.get(
        "/models/{name}/stats", summary="Get a model's statistics", responses=locked | known, openapi_extra=_NAMED
    )
    async def model_statistics(request: Request) -> dict[str, Any]:
        service.authorize(request_of(request.scope), "metrics")
        return stats(_model(request))

    @routes.get("/models/{name}/versions/{version}", include_in_schema=False)
    @routes.get("/models/{name}", summary="Describe a model's tensors", responses=locked | known, openapi_extra=_NAMED)
    async def metadata(request: Request) -> ModelMetadata:
        service.authorize(request_of(request.scope), "info")
        return models.metadata(_model(request))

    def stats(*models: Model) -> dict[str, Any]:
        counted = list(service.metrics.everywhere().collect())
        return {"model_stats": [model_stats(model.name, VERSION, counted) for model in models]}

    return routes


def _model(request: Request) -> Model:
    """Return the model in the path, whose version is optional. Raises Refusal 404."""
    return models.find(request.path_params["name"], request.path_params.get("version", VERSION))
