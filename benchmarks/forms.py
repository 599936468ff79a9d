"""Write requests and read answers in the formats of the service and of its peers.

The inputs of all calls share one block of memory, so that a body is a head and a part of that block.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from load import Buffer, Request
from numpy.typing import NDArray

from flashpoint_contract import wire

Array = NDArray[np.float32]
Headers = Mapping[str, str]

HEADS, DIM = 8, 64
LONGEST = 2048
_BLOCK = np.random.default_rng(0).random(4 * HEADS * LONGEST * DIM, np.float32)


class Case(NamedTuple):
    """Forward or gradient at (1, 8, length, 64) in float32."""

    length: int
    gradient: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, HEADS, self.length, DIM)

    @property
    def name(self) -> str:
        return f"{'gradient' if self.gradient else 'forward'} {self.length}"

    @property
    def tensors(self) -> dict[str, Array]:
        size = math.prod(self.shape)
        names = ("q", "k", "v", "do") if self.gradient else ("q", "k", "v")
        return {name: _BLOCK[i * size : (i + 1) * size].reshape(self.shape) for i, name in enumerate(names)}

    @property
    def data(self) -> memoryview:
        """Return the bytes of all tensors, one after the other."""
        return memoryview(_BLOCK[: len(self.tensors) * math.prod(self.shape)]).cast("B")

    def truth(self) -> dict[str, NDArray[np.float64]]:
        """Return the right answers, computed in float64 from the definition."""
        t = {name: a.astype(np.float64) for name, a in self.tensors.items()}
        s = t["q"] @ t["k"].swapaxes(-1, -2) / DIM**0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        o = p @ t["v"]
        if not self.gradient:
            return {"o": o}
        ds = p * (t["do"] @ t["v"].swapaxes(-1, -2) - (t["do"] * o).sum(-1, keepdims=True)) / DIM**0.5
        return {"dq": ds @ t["k"], "dk": ds.swapaxes(-1, -2) @ t["q"], "dv": p.swapaxes(-1, -2) @ t["do"]}


class Form(NamedTuple):
    """A format: `write` returns a case's headers and body, `read` an answer's tensors from its headers and body."""

    write: Callable[[Case], tuple[Headers, tuple[Buffer, ...]]]
    read: Callable[[Headers, bytes], dict[str, Array]]

    def request(self, path: str, case: Case) -> Request:
        headers, body = self.write(case)
        return Request.post(path, headers, body)


def _floats(data: bytes, shape: Any, start: int) -> Array:
    return np.frombuffer(data, np.float32, math.prod(shape), start).reshape(shape)


def _write_safetensors(case: Case) -> tuple[Headers, tuple[Buffer, ...]]:
    head = wire.build_head([(name, "float32", case.shape) for name in case.tensors], {})
    return {"Content-Type": wire.MEDIA_TYPE}, (head, case.data)


def _read_safetensors(headers: Headers, body: bytes) -> dict[str, Array]:
    head = wire.parse_head(body[: wire.head_size(body[:8])])
    return {t.name: _floats(body, t.shape, head.size + t.start) for t in head.tensors}


def _write_raw(case: Case) -> tuple[Headers, tuple[Buffer, ...]]:
    head = json.dumps([[name, case.shape] for name in case.tensors]).encode()
    head += b" " * (-(4 + len(head)) % 64)  # so that the tensors are aligned
    return {"Content-Type": "application/octet-stream"}, (struct.pack("<I", len(head)) + head, case.data)


def _read_raw(headers: Headers, body: bytes) -> dict[str, Array]:
    start = 4 + struct.unpack_from("<I", body)[0]
    answer = {}
    for name, shape in json.loads(body[4:start]):
        answer[name] = _floats(body, shape, start)
        start += answer[name].nbytes
    return answer


def _write_lists(case: Case) -> tuple[Headers, tuple[Buffer, ...]]:
    body = json.dumps({name: a.tolist() for name, a in case.tensors.items()}).encode()
    return {"Content-Type": "application/json"}, (body,)


def _read_lists(headers: Headers, body: bytes) -> dict[str, Array]:
    return {name: np.array(lists, np.float32) for name, lists in json.loads(body).items()}


def _described(case: Case, tensor: Callable[[Array], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors in the form of the Open Inference Protocol, each with the fields that `tensor` returns."""
    return [{"name": n, "shape": a.shape, "datatype": "FP32", **tensor(a)} for n, a in case.tensors.items()]


def _write_binary(case: Case) -> tuple[Headers, tuple[Buffer, ...]]:
    inputs = _described(case, lambda a: {"parameters": {"binary_data_size": a.nbytes}})
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, (head, case.data)


def _read_binary(headers: Headers, body: bytes) -> dict[str, Array]:
    start = int(headers["Inference-Header-Content-Length"])
    answer = {}
    for output in json.loads(body[:start])["outputs"]:
        answer[output["name"]] = _floats(body, output["shape"], start)
        start += answer[output["name"]].nbytes
    return answer


def _write_oip_json(case: Case) -> tuple[Headers, tuple[Buffer, ...]]:
    inputs = _described(case, lambda a: {"data": a.ravel().tolist()})
    return {"Content-Type": "application/json"}, (json.dumps({"inputs": inputs}).encode(),)


def _read_oip_json(headers: Headers, body: bytes) -> dict[str, Array]:
    outputs = json.loads(body)["outputs"]
    return {o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in outputs}


SAFETENSORS = Form(_write_safetensors, _read_safetensors)
RAW = Form(_write_raw, _read_raw)
LISTS = Form(_write_lists, _read_lists)
OIP_BINARY = Form(_write_binary, _read_binary)
OIP_JSON = Form(_write_oip_json, _read_oip_json)
