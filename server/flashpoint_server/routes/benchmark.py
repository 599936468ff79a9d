"""/benchmark: a grid timed beside the traffic, watched as it goes, drawn, and cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse

from flashpoint import jsonwire
from flashpoint._http.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint.benchmark_schema import BenchmarkJob, BenchmarkRequest, PlotKind, PlotTheme
from flashpoint_server.exchange import Exchange
from flashpoint_server.formats.json import JSON
from flashpoint_server.formats.message import read_model
from flashpoint_server.formats.negotiation import request_format
from flashpoint_server.http.body import RequestBody
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes import openapi_examples, pictures
from flashpoint_server.routes.benchmark_state import Benchmarks, KnownBenchmark, no_such_benchmark
from flashpoint_server.routes.problem_schema import problems
from flashpoint_server.service import Service

HEARTBEAT_SECONDS = 1.0  # between comments in a stream where nothing happens: a stopping server is noticed
CANCEL_SECONDS = 5.0  # how long a slice in which nothing can be stopped is waited for

REQUEST_LIMIT = 1 << 16  # bytes; hundreds of shapes
_SCHEMA = {"$ref": "#/components/schemas/BenchmarkRequest"}
_CONTENT = {jsonwire.MEDIA_TYPE: {"schema": _SCHEMA, "examples": openapi_examples.BENCHMARK}}
_ASKED = {"requestBody": {"required": True, "content": _CONTENT}}
# Any other is a 404, as no such address.
PictureFormat = Annotated[str, Path(json_schema_extra={"enum": [*pictures.MEDIA_TYPES]})]
_ERRORS = problems(401, 403, 404, 422)


def _answers(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {media: {} for media in media_types}}}


def router(service: Service, benchmarks: Benchmarks) -> APIRouter:
    routes = APIRouter(prefix="/benchmark", tags=["proof"])
    refused = problems(400, 401, 403, 408, 413, 415, 422, 429, 503)

    async def find(request: Request, id: str) -> KnownBenchmark:
        """The benchmark, if it is the caller's own, or the caller an administrator. Raises Refusal 401, 403, 404."""
        caller = service.admit(Exchange.of(request.scope), "benchmark")
        benchmark = await benchmarks.get(id)
        if caller.name != benchmark.owner and "admin" not in caller.rights:
            raise no_such_benchmark()
        return benchmark

    @routes.post("", status_code=202, summary="Time a grid", responses=refused, openapi_extra=_ASKED)
    async def start(request: Request, response: Response) -> BenchmarkJob:
        """Timing runs alone on the device, in slices between the requests that are served meanwhile."""
        caller = service.admit(Exchange.of(request.scope), "benchmark")  # before its body is read
        if request_format(request.headers) is not JSON:
            raise Refusal("unsupported_media_type", f"a benchmark is asked for in {jsonwire.MEDIA_TYPE}")
        body = RequestBody(request.scope, request.receive, request.headers, service.settings)
        asked = await read_model(body, BenchmarkRequest, REQUEST_LIMIT)
        opened = await benchmarks.open(asked, caller.name, service.check_ready())
        response.headers["Location"] = f"/benchmark/{opened.job.id}"
        return opened.job

    @routes.get("/{id}", summary="State, progress and rows", responses=_ERRORS)
    async def job(request: Request, id: str) -> BenchmarkJob:
        return (await find(request, id)).job

    told = _answers("one event for each thing that happens", EVENT_STREAM) | _ERRORS

    @routes.get(
        "/{id}/events", summary="The same as server-sent events", responses=told, response_class=StreamingResponse
    )
    async def events(request: Request, id: str, last_event_id: Annotated[int, Header(ge=0)] = 0) -> StreamingResponse:
        """One event for each thing that happens, from the first, or from the one after `Last-Event-ID`, to the end."""
        benchmark = await find(request, id)

        async def stream() -> AsyncIterator[bytes]:
            async for event in benchmark.follow(last_event_id, HEARTBEAT_SECONDS):
                if event is not None:
                    yield f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()
                elif service.draining:
                    return
                else:
                    yield b":\n\n"

        return StreamingResponse(stream(), media_type=EVENT_STREAM, headers={"Cache-Control": "no-store"})

    @routes.delete("/{id}", summary="Cancel", responses=_ERRORS)
    async def cancel(request: Request, id: str) -> BenchmarkJob:
        """Stop it at the end of its slice; a benchmark that has ended stays as it is."""
        benchmark = await find(request, id)
        if not benchmark.over:
            benchmarks.stop(benchmark)
            await benchmark.ended(CANCEL_SECONDS)
        return benchmark.job

    drawn = _answers("the picture", *pictures.MEDIA_TYPES.values()) | _ERRORS

    @routes.get("/{id}/plot.{format}", summary="A picture of its rows", responses=drawn, response_class=Response)
    async def plot(
        request: Request, id: str, format: PictureFormat, kind: PlotKind = "time", theme: PlotTheme = "light"
    ) -> Response:
        benchmark = await find(request, id)
        if format not in pictures.MEDIA_TYPES:
            raise Refusal("not_found", f"there are {' and '.join(pictures.MEDIA_TYPES)}")
        try:
            asked = (benchmark.job.model_dump_json(), kind, format, theme)
            picture = await service.codec.run(None, pictures.draw, *asked)
        except ValueError as error:
            raise invalid([("kind", str(error))]) from None
        return Response(picture, media_type=pictures.MEDIA_TYPES[format])

    return routes
