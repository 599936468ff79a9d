"""The two models, and how the protocol describes them: metadata, and a configuration as Triton has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from flashpoint.options import AttentionOptions
from flashpoint_kernels.spec import BACKWARD_TENSORS, FLOATS, FORWARD_TENSORS, GRADS, INDEX_TENSORS, INTS, Direction
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.head import PRIORITY_LEVELS
from flashpoint_server.refusal import Refusal

VERSION = "1"
PLATFORM = "flashpoint"

# The shape of each in its largest form; -1 is any size. Layouts, and forms with fewer dimensions: docs/http.md.
_RANKS = {"alibi_slopes": 2, "sinks": 1, "dsinks": 1, "lse": 3, "dlse": 3} | dict.fromkeys(INDEX_TENSORS, 1)


@dataclass(frozen=True)
class Model:
    name: str
    direction: Direction
    inputs: tuple[str, ...]
    required: tuple[str, ...]
    outputs: tuple[str, ...]


MODELS = {
    model.name: model
    for model in (
        Model("attention", "forward", FORWARD_TENSORS, ("q", "k", "v"), ("o", "lse")),
        Model("attention_grad", "backward", BACKWARD_TENSORS, ("q", "k", "v", "do"), GRADS),
    )
}


def find(name: str, version: str = "") -> Model:
    """The model of that name, where `version` is empty or its own. Raises Refusal 404."""
    if name not in MODELS:
        raise Refusal("not_found", f"there is no model {name!r}; there are {', '.join(MODELS)}")
    if version not in ("", VERSION):
        raise Refusal("not_found", f"model {name!r} has no version {version!r}, but {VERSION}")
    return MODELS[name]


class TensorMetadata(BaseModel):
    """`datatype` is one that is served; `parameters` name all of them."""

    name: str
    datatype: str
    shape: list[int] = Field(description="-1: any size")
    parameters: dict[str, Any]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any] = Field(description="the options, and their defaults")


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


def datatypes(name: str) -> list[str]:
    """Those that a tensor may have, the usual one first."""
    if name in INDEX_TENSORS:
        return [DATATYPE_OF[dtype] for dtype in reversed(INTS)]
    if name in ("lse", "dlse"):
        return [DATATYPE_OF["float32"]]
    floats = sorted((DATATYPE_OF[dtype] for dtype in FLOATS), key=lambda datatype: datatype != "FP32")
    return [*floats, "BOOL"] if name == "attn_mask" else floats


def metadata(model: Model) -> ModelMetadata:
    def tensor(name: str, **parameters: Any) -> TensorMetadata:
        first, *_ = known = datatypes(name)
        shape = [-1] * _RANKS.get(name, 4)
        parameters = {"datatypes": ",".join(known), **parameters}
        return TensorMetadata(name=name, datatype=first, shape=shape, parameters=parameters)

    return ModelMetadata(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name, optional=name not in model.required) for name in model.inputs],
        outputs=[tensor(name) for name in model.outputs],
        parameters=_defaults(),
    )


def configuration(model: Model, max_queue_delay: float) -> dict[str, Any]:
    """As Triton's `ModelConfig`, in JSON. `max_queue_delay` is in seconds."""

    def tensor(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "data_type": f"TYPE_{datatypes(name)[0]}",
            "dims": [-1] * _RANKS.get(name, 4),
        }

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,  # a tensor's shape says all of it; requests are batched whatever theirs are
        "input": [{**tensor(name), "optional": name not in model.required} for name in model.inputs],
        "output": [tensor(name) for name in model.outputs],
        "dynamic_batching": {
            "max_queue_delay_microseconds": round(max_queue_delay * 1e6),
            "priority_levels": PRIORITY_LEVELS,
            "default_priority_level": PRIORITY_LEVELS,
        },
        "parameters": {name: {"string_value": json.dumps(value)} for name, value in _defaults().items()},
    }


def _defaults() -> dict[str, Any]:
    """The options as parameters, which hold one value each: see head.py."""
    found = AttentionOptions.model_validate({}).model_dump()
    left, right = found.pop("window")
    found["grads"] = ",".join(found["grads"])
    return found | {"window_left": left, "window_right": right}
