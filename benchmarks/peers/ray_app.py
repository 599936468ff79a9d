"""A Ray Serve application with raw bodies, batches of equal shapes and one replica. `python ray_app.py PORT`"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = HERE  # the import path of the replica
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray  # noqa: E402
import torch  # noqa: E402
from op import BATCH, BATCH_SECONDS, attend_all, pack, unpack  # noqa: E402
from ray import serve  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402


@serve.deployment(max_ongoing_requests=32, ray_actor_options={"num_cpus": 1})
class Attention:
    def __init__(self) -> None:
        torch.set_num_threads(1)

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=BATCH_SECONDS)
    async def attend(self, requests: list[Any]) -> list[Any]:
        return attend_all(requests)

    async def __call__(self, request: Request) -> Response:
        answer = await self.attend(unpack(bytearray(await request.body())))
        return Response(pack(answer), media_type="application/octet-stream")


if __name__ == "__main__":
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    here = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 512 << 20}
    ray.init(log_to_driver=False, logging_level="error", **here)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Attention.bind(), route_prefix="/attn")
    stopped.wait()
    serve.shutdown()
    ray.shutdown()
