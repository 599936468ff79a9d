"""POST /attention and POST /attention/grad."""

from __future__ import annotations

from flashpoint_contract.options import Direction
from flashpoint_server.formats.negotiation import answer_format, request_format
from flashpoint_server.routes.compute.cached_attention import compute_cached
from flashpoint_server.routes.compute.saved_forward import compute_recalled, compute_saving
from flashpoint_server.routes.pipeline import RouteRequest, authorize, begin, compute, read, write


async def attention(request: RouteRequest, direction: Direction) -> None:
    """Answer a request for attention or its gradients. Raises Refusal and ClientGoneError."""
    authorize(request, "attention")
    given = request_format(request.headers)
    wanted = answer_format(request.headers, given)
    begin(request)
    message = await read(request, given)
    forward = direction == "forward"
    if forward and message.saves:
        job, answer = await compute_saving(request, message, wanted.numbers)
    elif forward and message.names_caches:
        job, answer = await compute_cached(request, message, wanted.numbers)
    elif message.recalls and not forward:
        job, answer = await compute_recalled(request, message, wanted.numbers)
    else:
        job, answer = await compute(request, message, direction, wanted.numbers)
    parts = await wanted.write(job, answer, request.service.codec)
    await write(request, job, answer, parts, {"content-type": wanted.media_type})
