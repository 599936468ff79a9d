"""A simple first server: FastAPI, a safetensors body, the operator inline or in the thread pool.

`python fastapi_safetensors.py PORT inline|pool THREADS`: torch uses THREADS threads for each call.
"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from op import attend
from safetensors.torch import load, save
from starlette.concurrency import run_in_threadpool

app = FastAPI()
PORT, WHERE, THREADS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def answer(body: bytes) -> bytes:
    return save({name: t.contiguous() for name, t in attend(load(body)).items()})


@app.post("/attn")
async def attn(request: Request) -> Response:
    body = await request.body()
    content = answer(body) if WHERE == "inline" else await run_in_threadpool(answer, body)
    return Response(content, media_type="application/octet-stream")


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="error", access_log=False)
