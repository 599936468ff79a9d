"""The two models of the protocol, and their descriptions: metadata, and Triton's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from flashpoint_contract.options import OPTIONS, Direction, Names
from flashpoint_contract.tensors import ANSWERS, REQUIRED, TAKEN, TENSORS
from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.head import PRIORITY_LEVELS, SIDES
from flashpoint_server.refusal import Refusal

VERSION = "1"
PLATFORM = "flashpoint"


@dataclass(frozen=True)
class Model:
    name: str
    direction: Direction
    inputs: tuple[str, ...]
    required: tuple[str, ...]
    outputs: tuple[str, ...]


def _carried(direction: Direction) -> tuple[str, ...]:
    return tuple(name for name in TAKEN[direction] if "oip" not in TENSORS[name].refused)


def _answered(direction: Direction) -> tuple[str, ...]:
    return tuple(name for name in ANSWERS[direction] if "oip" not in TENSORS[name].refused)


MODELS = {
    model.name: model
    for model in (
        Model("attention", "forward", _carried("forward"), REQUIRED["forward"], _answered("forward")),
        Model("attention_grad", "backward", _carried("backward"), REQUIRED["backward"], _answered("backward")),
    )
}


def find(name: str, version: str = "") -> Model:
    """Return the model of this name and version; an empty version means any. Raises Refusal 404."""
    if name not in MODELS:
        raise Refusal(
            "not_found", f"model {name!r} does not exist; use {' or '.join(MODELS)}{did_you_mean(name, MODELS)}"
        )
    if version not in ("", VERSION):
        near = did_you_mean(version, [VERSION])
        raise Refusal("not_found", f"model {name!r} has only version {VERSION}, not {version!r}{near}")
    return MODELS[name]


class TensorMetadata(BaseModel):
    """A tensor of a model. `datatype` is the usual one; `parameters` contain all."""

    name: str
    datatype: str
    shape: list[int] = Field(description="sizes; -1 is any size")
    parameters: dict[str, Any]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any] = Field(description="options with their defaults")


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


def datatypes(name: str) -> list[str]:
    """Return the datatypes of a tensor, the usual one first."""
    row = TENSORS[name]
    dtypes = (*row.dtypes, *(dtype for dtype in row.quantized if dtype in DATATYPE_OF))
    if "float16" not in dtypes and "float32" in dtypes:  # lse and its gradient are always float32
        dtypes = ("float32",)
    usual = ("float32", "int64")
    return [DATATYPE_OF[dtype] for dtype in sorted(dtypes, key=lambda dtype: (dtype not in usual, dtype == "bool"))]


def _any_size(name: str) -> list[int]:
    """Return the shape of a tensor with its maximum number of dimensions, each -1: any size."""
    return [-1] * len(TENSORS[name].axes)


def metadata(model: Model) -> ModelMetadata:
    def tensor(name: str, **parameters: Any) -> TensorMetadata:
        first, *_ = known = datatypes(name)
        shape = _any_size(name)
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
    """Return the model's configuration as Triton's `ModelConfig` in JSON. `max_queue_delay` is in seconds."""

    def tensor(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "data_type": f"TYPE_{datatypes(name)[0]}",
            "dims": _any_size(name),
        }

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,  # tensors have no separate batch dimension here; requests of all shapes are batched
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
    """Return the defaults of the options as parameters with one value each: an option that is a pair becomes two."""
    defaults: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if name in SIDES:
            defaults |= dict(zip(SIDES[name], option.default, strict=True))
        else:
            defaults[name] = ",".join(option.default) if isinstance(option.kind, Names) else option.default
    return defaults
