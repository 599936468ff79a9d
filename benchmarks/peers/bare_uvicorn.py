"""An upper bound of the service's speed: uvicorn (httptools, uvloop) with a few lines of ASGI.

`python bare_uvicorn.py` listens on a free port of 127.0.0.1 and prints it. /discard discards the body as it comes,
/echo answers with the body, /bytes/N discards the body and answers with N prepared bytes.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

import uvicorn

prepared = functools.cache(bytes)  # prepared(N) returns N zero bytes, made once


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    path, pieces, more = scope["path"], [], True
    while more:
        message = await receive()
        more = message["more_body"]
        if path == "/echo":
            pieces.append(message["body"])
    body = prepared(int(path.removeprefix("/bytes/"))) if path.startswith("/bytes/") else b"".join(pieces)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", ws="none", lifespan="off", log_level="warning", access_log=False,
            timeout_keep_alive=600,  # do not close a connection that is idle while other servers are measured
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])
