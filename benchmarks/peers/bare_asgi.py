"""A minimal ASGI application on uvicorn (httptools, uvloop), with the operator inline.

`python bare_asgi.py PORT`
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import uvicorn
from op import attend, pack, unpack


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = bytearray(int(dict(scope["headers"])[b"content-length"]))
    filled, more = 0, True
    while more:
        message = await receive()
        piece = message["body"]
        body[filled : filled + len(piece)] = piece
        filled += len(piece)
        more = message["more_body"]
    answer = pack(attend(unpack(body)))
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    torch.set_num_threads(1)
    quiet = {"log_level": "error", "access_log": False, "lifespan": "off"}
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), http="httptools", loop="uvloop", **quiet)
