"""/benchmark: start, follow, plot and cancel benchmarks, which time a grid of cases between other requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse

from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.benchmark import BenchmarkJob, BenchmarkRequest, PlotKind, PlotTheme
from flashpoint_contract.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint_server.access.keys import Caller
from flashpoint_server.formats.message import read_model
from flashpoint_server.formats.negotiation import HEARTBEAT_SECONDS, check_json
from flashpoint_server.http.body import RequestBody
from flashpoint_server.http.request import request_of
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import deadline_of
from flashpoint_server.routes.schema import openapi_examples
from flashpoint_server.routes.schema.problem_schema import JSON_ALONE, problems, reference
from flashpoint_server.routes.timing import pictures
from flashpoint_server.routes.timing.benchmark_state import Benchmarks, KnownBenchmark, no_such_benchmark
from flashpoint_server.service import Service

CANCEL_SECONDS = 5.0  # maximum wait for a benchmark's running slice, which cannot be interrupted

REQUEST_LIMIT = 1 << 16  # maximum bytes of a request's body; enough for hundreds of shapes
_CONTENT = {"schema": reference("BenchmarkRequest"), "examples": openapi_examples.BENCHMARK}
_BODY = {"requestBody": {"required": True, "content": {jsonwire.MEDIA_TYPE: _CONTENT}}}
# The format of a plot, in its path. The server answers 404 for a format that is not in the enum.
PictureFormat = Annotated[str, Path(json_schema_extra={"enum": [*pictures.MEDIA_TYPES]})]
_READ = ("unauthorized", "forbidden", "cross_site", "not_found", "invalid_request")
_STARTED = (
    "malformed_body", "unauthorized", "forbidden", "cross_site", "body_timeout", "body_too_large",
    "unsupported_media_type", "invalid_request", "queue_full", "key_limit", "not_ready", "draining", "engine_lost",
)  # fmt: skip


def _answers(description: str, *media_types: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {media: {} for media in media_types}}}


def router(service: Service, benchmarks: Benchmarks) -> APIRouter:
    routes = APIRouter(prefix="/benchmark", tags=["verify and benchmark"])
    refused = problems(
        *_STARTED,
        unsupported_media_type=JSON_ALONE,
        invalid_request="preset: must be 'papers', 'h100' or 'seeds'",
        queue_full="8 benchmarks are queued or running, 4 of them yours; wait until one ends",
        engine_lost="the engine did not accept this benchmark; retry",
    )
    known = problems(*_READ[:-1])

    async def find(request: Request, id: str) -> tuple[Caller, KnownBenchmark]:
        """Return the caller and their benchmark; with `admin`, anyone's. Raises Refusal 401, 403 and 404."""
        caller = service.authorize(request_of(request.scope), "benchmark")
        benchmark = await benchmarks.get(id)
        if caller.name != benchmark.owner and "admin" not in caller.rights:
            raise no_such_benchmark()
        return caller, benchmark

    @routes.post("", status_code=202, summary="Start a benchmark", responses=refused, openapi_extra=_BODY)
    async def start(request: Request, response: Response) -> BenchmarkJob:
        """The benchmark runs in short slices. Between them the device serves other requests."""
        caller = service.authorize(request_of(request.scope), "benchmark")  # first, so that a refused body is not read
        check_json(request.headers)
        body = RequestBody(request.scope, request.receive, request.headers, service.settings)
        benchmark_request = await read_model(body, BenchmarkRequest, REQUEST_LIMIT, service.codec)
        opened = await benchmarks.open(benchmark_request, caller.name, service.check_ready())
        response.headers["Location"] = f"/benchmark/{opened.job.id}"
        return opened.job

    @routes.get("/{id}", summary="Describe a benchmark: state, progress and rows", responses=known)
    async def job(request: Request, id: str) -> BenchmarkJob:
        return (await find(request, id))[1].job

    wrong = problems(*_READ, invalid_request="last-event-id: must be an integer")
    event_answers = _answers("The events, as server-sent events.", EVENT_STREAM) | wrong

    @routes.get(
        "/{id}/events", summary="Follow a benchmark's events", responses=event_answers, response_class=StreamingResponse
    )
    async def events(
        request: Request,
        id: str,
        last_event_id: Annotated[int, Header(ge=0, description="Continue after this event.")] = 0,
    ) -> StreamingResponse:
        """Stream every event from the first, or from the one after `Last-Event-ID`, until the benchmark ends."""
        _, benchmark = await find(request, id)

        async def stream() -> AsyncIterator[bytes]:
            async for event in benchmark.follow(last_event_id, HEARTBEAT_SECONDS):
                if event is not None:
                    yield f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()
                elif service.draining:
                    return
                else:
                    yield b":\n\n"

        return StreamingResponse(stream(), media_type=EVENT_STREAM)

    @routes.delete("/{id}", summary="Cancel a benchmark", responses=known)
    async def cancel(request: Request, id: str) -> BenchmarkJob:
        """Stop the benchmark after its current slice. A benchmark that has ended does not change."""
        _, benchmark = await find(request, id)
        if not benchmark.over:
            benchmarks.stop(benchmark)
            await benchmark.ended(CANCEL_SECONDS)
        return benchmark.job

    undrawn = "kind: must be 'time', 'tflops', 'speedup', 'memory' or 'roofline'"
    waits = (
        "queue_full",
        "key_limit",
        "out_of_memory",
        "engine_lost",
        "deadline_exceeded",
    )  # errors of a plot that waits
    drawn = _answers("The picture.", *pictures.MEDIA_TYPES.values()) | problems(*_READ, *waits, invalid_request=undrawn)

    @routes.get("/{id}/plot.{format}", summary="Draw a benchmark's rows", responses=drawn, response_class=Response)
    async def plot(
        request: Request, id: str, format: PictureFormat, kind: PlotKind = "time", theme: PlotTheme = "light"
    ) -> Response:
        caller, benchmark = await find(request, id)
        if format not in pictures.MEDIA_TYPES:
            drawable = " or ".join(f"plot.{one}" for one in pictures.MEDIA_TYPES)
            raise Refusal("not_found", f"plot.{format} does not exist; use {drawable}")
        body = RequestBody(request.scope, request.receive, request.headers, service.settings)
        body.deadline = deadline_of(request.headers, service.settings)
        ours = request_of(request.scope)
        ours.body = body
        service.admission.enter(ours, 0, caller.quota)
        try:
            rows = benchmark.job.model_dump_json()
            drawing = service.codec.plots.run(body.deadline, pictures.draw, rows, kind, format, theme)
            picture = await body.while_connected(drawing)
        except ValueError as error:
            raise invalid([("kind", str(error))]) from None
        finally:
            service.admission.leave(ours)
            del ours.body  # it leads back to the request
        return Response(picture, media_type=pictures.MEDIA_TYPES[format])

    return routes
