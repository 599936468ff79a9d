"""Simple servers on uvicorn, as a beginner writes them: `python on_uvicorn.py PORT APP THREADS`.

APP: `bare` is a minimal ASGI application with raw bodies; `inline` and `pool` are FastAPI with safetensors, and run the
operator in the event loop or in the thread pool; `json` is FastAPI with tensors as JSON lists through pydantic, as
tutorials do. torch uses THREADS threads for each call.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from op import attend, pack, unpack
from pydantic import BaseModel
from safetensors.torch import load, save
from starlette.concurrency import run_in_threadpool

Tensor4 = list[list[list[list[float]]]]
apps = {name: FastAPI() for name in ("inline", "pool", "json")}


async def bare(scope: dict[str, Any], receive: Any, send: Any) -> None:
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


def saved(body: bytes) -> Response:
    content = save({name: t.contiguous() for name, t in attend(load(body)).items()})
    return Response(content, media_type="application/octet-stream")


@apps["inline"].post("/attn")
async def inline(request: Request) -> Response:
    return saved(await request.body())


@apps["pool"].post("/attn")
async def pool(request: Request) -> Response:
    return await run_in_threadpool(saved, await request.body())


class Inputs(BaseModel):
    q: Tensor4
    k: Tensor4
    v: Tensor4
    do: Tensor4 | None = None


@apps["json"].post("/attn")
def lists(inputs: Inputs) -> dict[str, Tensor4]:
    tensors = {name: torch.tensor(value) for name, value in inputs if value is not None}
    return {name: t.tolist() for name, t in attend(tensors).items()}


if __name__ == "__main__":
    port, app, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    options: dict[str, Any] = {"host": "127.0.0.1", "port": int(port), "log_level": "error", "access_log": False}
    if app == "bare":
        options |= {"lifespan": "off", "http": "httptools", "loop": "uvloop"}
    uvicorn.run(bare if app == "bare" else apps[app], **options)
