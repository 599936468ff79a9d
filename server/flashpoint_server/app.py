"""The application. `create_app` joins the routes, the error handlers and the engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from flashpoint_contract.options import Direction
from flashpoint_contract.schemas.validation import said
from flashpoint_server.config.files import Files
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.envelope import ENDLESS, Application, Envelope
from flashpoint_server.http.origin_policy import Cors
from flashpoint_server.http.request import request_of
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.oip import memory_routes, schema
from flashpoint_server.oip import routes as oip
from flashpoint_server.oip.infer import Counted, infer, make_body
from flashpoint_server.oip.models import MODELS
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.page import page
from flashpoint_server.plan import Kind
from flashpoint_server.processes.processes import ENGINE, running_engines
from flashpoint_server.refusal import STATUS, Refusal, invalid
from flashpoint_server.routes import status
from flashpoint_server.routes.compute.cached_attention import compute_cached
from flashpoint_server.routes.compute.saved_forward import compute_recalled, compute_saving
from flashpoint_server.routes.pipeline import Compute, Route, attention
from flashpoint_server.routes.schema import openapi
from flashpoint_server.routes.tensors import caches, saved
from flashpoint_server.routes.timing import benchmark
from flashpoint_server.routes.timing.benchmark_state import Benchmarks
from flashpoint_server.routes.verify import verify
from flashpoint_server.service import Service

PATHS: dict[str, Direction] = {"/attention": "forward", "/attention/grad": "backward"}
PLANNERS: dict[Kind, Compute] = {"caches": compute_cached, "save": compute_saving, "saved": compute_recalled}
_CODES = {status: code for code, status in reversed(STATUS.items())}  # each HTTP status's first error code


def create_app(
    settings: Settings | None = None,
    engines: Sequence[bytes] | None = None,
    engine_module: str = ENGINE,
    shared: WorkerGroup = WorkerGroup(),  # noqa: B008  # a tuple
    files: Files | None = None,
) -> FastAPI:
    """Return the service as an ASGI application.

    `settings` default to the FLASHPOINT_* variables. `engines` are the addresses of engine processes. Without them, the
    lifespan starts one engine process for each device, which runs `engine_module`, and ends it. `shared` has the
    memory that all HTTP processes of the server share. `files` has the keys and certificates; else
    the application reads them. The routes share `app.state.service`.
    """
    settings = settings or Settings()
    service = Service(settings, shared, files)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as inside:
            addresses = engines
            if addresses is None:
                addresses = await inside.enter_async_context(running_engines(settings, engine_module))
            inside.callback(service.close)
            service.pool.warm()
            service.engine.connect(addresses)
            reload = service.files.watch_keys(service.reload_keys)
            for watching in (service.keep_reporting(), service.keep_timing(), reload.run()):
                inside.push_async_callback(_ended, asyncio.ensure_future(watching))
            app.openapi()  # made here and kept: it would hold the event loop for 80 ms
            yield

    app = Application(
        title="Flashpoint",
        summary="Flash attention as an endpoint",
        version=version("flashpoint"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's docs page would load scripts from another host; page/ serves /docs without them
        redoc_url=None,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.service = service
    posts: dict[str, ASGIApp] = {
        path: Route(service, partial(attention, direction=direction, planners=PLANNERS))
        for path, direction in PATHS.items()
    }
    posts["/verify"] = Route(service, verify)
    app.state.statistics = statistics = Statistics(service.metrics.registry)
    for model in MODELS.values():
        route = Route(service, partial(infer, model=model, statistics=statistics), make_body)
        posts |= dict.fromkeys(oip.infer_paths(model), Counted(route, statistics, model.name))
    tensor_routes = [*caches.routes(service), *saved.routes(service)]
    app.router.routes += tensor_routes
    for path, post in posts.items():  # register these paths with FastAPI, so that it answers other methods with 405
        app.router.routes.append(StarletteRoute(path, post, methods=["POST"]))
    routers = [
        status.router(service),
        benchmark.router(service, Benchmarks(settings, service.engine)),
        *(skin(service) for skin in (oip.router, memory_routes.router, memory_routes.cuda_router, page.router)),
    ]
    for router in routers:
        app.include_router(router)
    # Metrics name a route by its path, with * for each parameter; logs show only the parts that are not parameters.
    paths = {*posts, *(re.sub(r"\{\w+\}", "*", route.path) for route in tensor_routes)}
    routes = (route for router in (app.router, *routers) for route in router.routes)
    app.state.paths = [route.path for route in routes if isinstance(route, StarletteRoute)]
    words = {part for path in app.state.paths for part in path.split("/") if "{" not in part}
    shared_arguments = (paths, service.ended, words, service.sites.check, {"v2": oip.written})
    probes = status.PROBES | oip.PROBES
    direct: Mapping[str, ASGIApp] = posts
    if settings.cors_origins:
        app.add_middleware(Cors, settings)
        direct = {path: Cors(route, settings) for path, route in posts.items()}
    app.add_middleware(Envelope, *shared_arguments, probes)
    app.posts = {path: Envelope(route, *shared_arguments) for path, route in direct.items()}
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    openapi.install(app, PATHS, schema.add)
    return app


# Health paths that other services use -> the equivalent paths of this service.
_PROBES = {
    **dict.fromkeys(("/health", "/healthz", "/livez", "/live", "/ping"), "/health/live"),
    **dict.fromkeys(("/readyz", "/ready"), "/health/ready"),
}
_LONGEST = 64  # maximum characters of an unknown path for which a similar path of the service is suggested


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _refused(request: Request, refusal: Any) -> Response:
    ours = request_of(request.scope)
    ours.code = refusal.code
    media_type, body = ours.write_refusal(refusal, ours.request_id)
    return Response(body, refusal.status, refusal.headers, media_type)


async def _framework_error(request: Request, error: Any) -> Response:
    code = _CODES.get(error.status_code, "internal_error")
    what = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = _allowed(request)
        refusal = Refusal(code, f"{what} is not served; send {allowed}", headers={"Allow": allowed})
    else:
        detail = _missing(request) if error.status_code == 404 else error.detail
        refusal = Refusal(code, detail, headers=error.headers)
    return await _refused(request, refusal)


def _missing(request: Request) -> str:
    path = request.url.path
    plain = path.lower().rstrip("/") if len(path) <= _LONGEST else ""
    near = [_PROBES[plain]] if plain in _PROBES else get_close_matches(plain, request.app.state.paths, 1, 0.7)
    return f"there is no {path}: did you mean {near[0]}? See /docs" if near else f"there is no {path}: see /docs"


def _allowed(request: Request) -> str:
    """Return all methods of a path, for the Allow header.

    FastAPI names only the methods of one route, but several routes may share a path.
    """
    routes = request.app.router.routes
    # an exact path is preferred to one with {id}
    routes = [r for r in routes if getattr(r, "path", None) == request.url.path] or routes
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "POST", "DELETE")}
    methods = [m for m, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in routes)]
    if "GET" in methods and not request.url.path.endswith(ENDLESS):
        methods.insert(1, "HEAD")
    return ", ".join(methods)


async def _invalid(request: Request, error: Any) -> Response:
    return await _refused(request, invalid((".".join(map(str, e["loc"][1:])), said(e)) for e in error.errors()))
