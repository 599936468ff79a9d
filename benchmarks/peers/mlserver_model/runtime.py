"""An MLServer runtime for the operator, with tensors as JSON, the format of MLServer's REST interface.

`mlserver start DIRECTORY`, with peers/ on PYTHONPATH and ports in MLSERVER_HTTP_PORT, _GRPC_PORT and _METRICS_PORT.
"""

from __future__ import annotations

import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from op import attend


class Attention(MLModel):
    async def load(self) -> bool:
        torch.set_num_threads(1)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = {i.name: torch.from_numpy(NumpyCodec.decode_input(i)) for i in payload.inputs}
        outputs = [NumpyCodec.encode_output(name, t.numpy()) for name, t in attend(given).items()]
        return InferenceResponse(model_name=self.name, outputs=outputs)
