"""HTTP/1.0: no chunks, and connections that are kept where the client asks for that; uvicorn has neither."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def persistence(cycle: RequestResponseCycle) -> list[tuple[bytes, bytes]]:
    """Return the field that says whether the connection is kept; none where the version says it."""
    if not cycle.keep_alive:
        return [(b"connection", b"close")]
    return [(b"connection", b"keep-alive")] if cycle.scope["http_version"] == "1.0" else []


def answering(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return `app` for the HTTP/1.0 request of `cycle`: an answer without a length ends with its connection."""

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
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares the two
            await send(message)

        await app(scope, receive, send_sized)

    return answer
