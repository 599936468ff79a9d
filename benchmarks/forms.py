"""Write requests and read answers in the formats of our service and of the servers that it is compared with."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint_contract import wire

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Headers = Mapping[str, str]
Buffer = bytes | memoryview
Message = tuple[dict[str, str], tuple[Buffer, ...]]  # the headers, and the body in pieces
Request = tuple[Buffer, ...]  # a request in pieces, the first of which is the head

HEADS, DIM = 8, 64
LONGEST = 2048
DATATYPES = {"float32": "FP32", "int64": "INT64"}  # dtype names of the Open Inference Protocol
# The inputs of all cases share one block of memory.
_BLOCK = np.random.default_rng(0).random(4 * HEADS * LONGEST * DIM, np.float32)


def post(path: str, message: Message) -> Request:
    """Return a POST request with the headers and the body of `message`."""
    headers, body = message
    lines = {"Host": "127.0.0.1", "Content-Length": sum(memoryview(piece).nbytes for piece in body), **headers}
    text = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return (text.encode(), *body)


class Form(NamedTuple):
    """A wire format. `write` returns a request's headers and body; `read` returns the tensors of an answer, by name."""

    write: Callable[..., Message]
    read: Callable[[Headers, bytes], dict[str, Array]]

    def whole(self, tensors: Tensors, **options: Any) -> tuple[dict[str, str], bytes]:
        """Return the headers, and the whole body as one piece."""
        headers, body = self.write(tensors, **options)
        return headers, b"".join(body)


class Case(NamedTuple):
    """A forward or gradient call at (1, 8, length, 64) in float32."""

    length: int
    gradient: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, HEADS, self.length, DIM)

    @property
    def name(self) -> str:
        return f"{'gradient' if self.gradient else 'forward'} {self.length}"

    @property
    def path(self) -> str:
        """Return the path of this call at the service."""
        return "/attention/grad" if self.gradient else "/attention"

    @property
    def tensors(self) -> dict[str, Array]:
        names = ("q", "k", "v", "do") if self.gradient else ("q", "k", "v")
        parts = _BLOCK[: 4 * math.prod(self.shape)].reshape(4, *self.shape)
        return dict(zip(names, parts, strict=False))


def truth(tensors: Tensors, causal: bool = False, left: int = -1) -> dict[str, Array]:
    """Return the exact answer, computed in float64: `o`, or the gradients if `tensors` has `do`.

    The last query has the position of the last key. A query sees at most `left` keys before its position; -1: all. If
    it sees no key, its `o` is 0.
    """
    q, k, v = (tensors[name].astype(np.float64) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat(group, 1), v.repeat(group, 1)
    scale = q.shape[-1] ** -0.5
    s = scale * q @ keys.swapaxes(-1, -2)
    queries, all_keys = s.shape[-2:]
    behind = np.arange(all_keys - queries, all_keys)[:, None] - np.arange(all_keys)
    s = np.where((not causal or behind >= 0) & (left < 0 or behind <= left), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    o = p @ values
    if "do" not in tensors:
        return {"o": o}
    do = tensors["do"].astype(np.float64)
    ds = scale * p * (do @ values.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True))

    def shared(grad: Array) -> Array:
        return grad.reshape(len(k), k.shape[1], group, *grad.shape[2:]).sum(2)

    return {"dq": ds @ keys, "dk": shared(ds.swapaxes(-1, -2) @ q), "dv": shared(p.swapaxes(-1, -2) @ do)}


def _pieces(tensors: Tensors) -> tuple[Buffer, ...]:
    return tuple(np.ascontiguousarray(t).reshape(-1).view(np.uint8).data for t in tensors.values())


def _arrays(named: Iterable[tuple[str, Any]], data: bytes, start: int) -> dict[str, Array]:
    """Return float32 arrays with these names and shapes; their data start at `start` and follow one another."""
    arrays = {}
    for name, shape in named:
        arrays[name] = np.frombuffer(data, np.float32, math.prod(shape), start).reshape(shape)
        start += arrays[name].nbytes
    return arrays


def _write_safetensors(tensors: Tensors, **options: Any) -> Message:
    head = wire.build_head([(n, t.dtype.name, t.shape) for n, t in tensors.items()], wire.encode_options(options))
    return {"Content-Type": wire.MEDIA_TYPE}, (head, *_pieces(tensors))


def _read_safetensors(headers: Headers, body: bytes) -> dict[str, Array]:
    head = wire.parse_head(body[: wire.head_size(body[:8])])
    return _arrays([(t.name, t.shape) for t in head.tensors], body, head.size)


def _write_raw(tensors: Tensors) -> Message:
    head = json.dumps([[name, t.shape] for name, t in tensors.items()]).encode()
    head += b" " * (-(4 + len(head)) % 64)  # so that the tensors are aligned
    return {"Content-Type": "application/octet-stream"}, (struct.pack("<I", len(head)) + head, *_pieces(tensors))


def _read_raw(headers: Headers, body: bytes) -> dict[str, Array]:
    start = 4 + struct.unpack_from("<I", body)[0]
    return _arrays(json.loads(body[4:start]), body, start)


def _write_lists(tensors: Tensors) -> Message:
    body = json.dumps({name: t.tolist() for name, t in tensors.items()}).encode()
    return {"Content-Type": "application/json"}, (body,)


def _read_lists(headers: Headers, body: bytes) -> dict[str, Array]:
    return {name: np.array(lists, np.float32) for name, lists in json.loads(body).items()}


def _described(tensors: Tensors, fields: Callable[[Array], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors in the format of the Open Inference Protocol, each with the fields that `fields` returns."""
    return [{"name": n, "shape": t.shape, "datatype": DATATYPES[t.dtype.name], **fields(t)} for n, t in tensors.items()]


def _write_binary(tensors: Tensors, **options: Any) -> Message:
    inputs = _described(tensors, lambda t: {"parameters": {"binary_data_size": t.nbytes}})
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **options}}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, (head, *_pieces(tensors))


def _read_binary(headers: Headers, body: bytes) -> dict[str, Array]:
    start = int(headers["Inference-Header-Content-Length"])
    return _arrays([(output["name"], output["shape"]) for output in json.loads(body[:start])["outputs"]], body, start)


def _write_oip_json(tensors: Tensors) -> Message:
    inputs = _described(tensors, lambda t: {"data": t.ravel().tolist()})
    return {"Content-Type": "application/json"}, (json.dumps({"inputs": inputs}).encode(),)


def _read_oip_json(headers: Headers, body: bytes) -> dict[str, Array]:
    outputs = json.loads(body)["outputs"]
    return {o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in outputs}


SAFETENSORS = Form(_write_safetensors, _read_safetensors)
RAW = Form(_write_raw, _read_raw)
LISTS = Form(_write_lists, _read_lists)
OIP_BINARY = Form(_write_binary, _read_binary)
OIP_JSON = Form(_write_oip_json, _read_oip_json)
