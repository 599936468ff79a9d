"""FastAPI with tensors as JSON lists through pydantic, as tutorials do. `python fastapi_json.py PORT`"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI
from op import attend
from pydantic import BaseModel

Tensor4 = list[list[list[list[float]]]]


class Inputs(BaseModel):
    q: Tensor4
    k: Tensor4
    v: Tensor4
    do: Tensor4 | None = None


app = FastAPI()


@app.post("/attn")
def attn(inputs: Inputs) -> dict[str, Tensor4]:
    tensors = {name: torch.tensor(value) for name, value in inputs if value is not None}
    return {name: t.tolist() for name, t in attend(tensors).items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
