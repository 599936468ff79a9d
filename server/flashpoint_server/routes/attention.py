"""POST /attention and POST /attention/grad."""

from __future__ import annotations

from flashpoint_contract.options import Direction
from flashpoint_server.formats.negotiation import answer_format, request_format
from flashpoint_server.routes.pipeline import Request, authorize, begin, compute, read, write


async def attention(request: Request, direction: Direction) -> None:
    """Answer a request for attention or its gradients. Raises Refusal and ClientGoneError."""
    authorize(request, "attention")
    given = request_format(request.headers)
    wanted = answer_format(request.headers, given)
    begin(request)
    message = await read(request, given)
    job, answer = await compute(request, message, direction, wanted.numbers)
    parts = await wanted.write(job, answer, request.service.codec)
    await write(request, job, answer, parts, {"content-type": wanted.media_type})
