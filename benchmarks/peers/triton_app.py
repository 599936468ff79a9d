"""NVIDIA's Triton server, run by pytriton, with its binary HTTP format. `python triton_app.py PORT GRPC_PORT`"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from op import BATCH, BATCH_SECONDS, GRADS, attend
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def attention(**inputs: Any) -> dict[str, Any]:
    return {name: t.numpy() for name, t in attend({name: torch.from_numpy(a) for name, a in inputs.items()}).items()}


def tensors(*names: str) -> list[Tensor]:
    return [Tensor(name=name, dtype=np.float32, shape=(-1, -1, -1)) for name in names]


if __name__ == "__main__":
    torch.set_num_threads(1)
    http, grpc = map(int, sys.argv[1:])
    addresses = {"http_address": "127.0.0.1", "http_port": http, "grpc_address": "127.0.0.1", "grpc_port": grpc}
    with Triton(config=TritonConfig(**addresses, allow_metrics=False, log_verbose=0)) as triton:
        for model, inputs, outputs in (("attn", "q k v", ("o",)), ("attn_grad", "q k v do", GRADS)):
            batcher = DynamicBatcher(max_queue_delay_microseconds=round(BATCH_SECONDS * 1e6))
            triton.bind(
                model_name=model,
                infer_func=attention,
                inputs=tensors(*inputs.split()),
                outputs=tensors(*outputs),
                config=ModelConfig(max_batch_size=BATCH, batcher=batcher),
            )
        triton.serve()
