"""A LitServe server with raw bodies, batches of equal shapes and a ZeroMQ queue. `python litserve_app.py PORT`"""

import sys
from typing import Annotated

import litserve
import torch
from fastapi import Body, Response
from op import BATCH, BATCH_SECONDS, attend_all, pack, unpack
from torch import Tensor

Tensors = dict[str, Tensor]


class Attention(litserve.LitAPI):
    def setup(self, device: str) -> None:
        torch.set_num_threads(1)

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Tensors:
        return unpack(bytearray(request))

    def batch(self, inputs: list[Tensors]) -> list[Tensors]:
        return inputs

    def predict(self, x: list[Tensors]) -> list[Tensors]:
        return attend_all(x)

    def unbatch(self, output: list[Tensors]) -> list[Tensors]:
        return output

    def encode_response(self, output: Tensors) -> Response:
        return Response(pack(output), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Attention(max_batch_size=BATCH, batch_timeout=BATCH_SECONDS, api_path="/attn")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=120)
    quiet = {"log_level": "error", "access_log": False}
    server.run(host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False, **quiet)
