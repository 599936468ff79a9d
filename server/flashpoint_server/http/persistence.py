"""Whether a connection stays open after an answer: the Connection field, and the rules of HTTP/1.0."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def persistence(cycle: RequestResponseCycle) -> list[tuple[bytes, bytes]]:
    """Return the Connection field; nothing if the HTTP version implies it."""
    if not cycle.keep_alive:
        return [(b"connection", b"close")]
    return [(b"connection", b"keep-alive")] if cycle.scope["http_version"] == "1.0" else []


def answering(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return `app` for an HTTP/1.0 request: an answer without a length ends with its connection.

    HTTP/1.0 has no chunks, and keeps a connection only if the client asks for it. uvicorn implements neither.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        endless = False

        async def send_sized(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if endless := b"content-length" not in names:
                    cycle.keep_alive = cycle.chunked_encoding = False
                elif cycle.keep_alive and b"connection" not in names:
                    message["headers"] = [*message["headers"], *persistence(cycle)]
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares the two lengths
            await send(message)

        await app(scope, receive, send_sized)

    return answer
