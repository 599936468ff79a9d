"""A BentoML service that mounts an ASGI application with raw bodies (op.py): `bentoml serve bento_service:Attention`"""

from __future__ import annotations

import bentoml
import torch
from op import attend, pack, unpack
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

torch.set_num_threads(1)


async def attn(request: Request) -> Response:
    answer = pack(attend(unpack(bytearray(await request.body()))))
    return Response(answer, media_type="application/octet-stream")


@bentoml.service(workers=1, traffic={"timeout": 120, "concurrency": 64})
@bentoml.asgi_app(Starlette(routes=[Route("/attn", attn, methods=["POST"])]), path="/raw")
class Attention:
    pass
