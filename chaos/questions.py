"""Questions are requests in every encoding, each with the bytes that an idle service answers."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import forms
from chaos.keys import LOAD, bearer
from flashpoint_contract import wire
from flashpoint_contract.schemas import jsonwire

SAFETENSORS, JSON = wire.MEDIA_TYPE, jsonwire.MEDIA_TYPE
SECONDS = 60.0  # timeout of a request to an idle service
LENGTHS = (1, 7, 33, 64, 129, 300)


@dataclass(eq=False)
class Question:
    """One request. `ask_alone` sets `right`, the body of its answer."""

    path: str
    headers: dict[str, str]
    body: bytes
    tensors: dict[str, np.ndarray]
    options: dict[str, Any]
    right: bytes = b""
    answer: dict[str, np.ndarray] = field(default_factory=dict)  # tensors of a safetensors answer


def safetensors(tensors, options, path):
    headers, body = forms.SAFETENSORS.whole(tensors, **options)
    return Question(path, {**headers, **bearer(LOAD)}, body, tensors, options)


def numbers(tensors, options, path):
    headers = {"Content-Type": JSON, **bearer(LOAD)}
    return Question(path, headers, jsonwire.encode(tensors, options), tensors, options)


def inference(tensors, options, path):
    """Return a question in the Open Inference Protocol, with tensors as raw bytes."""
    inputs = [
        {"name": n, "shape": a.shape, "datatype": "FP32", "parameters": {"binary_data_size": a.nbytes}}
        for n, a in tensors.items()
    ]
    head = json.dumps({"id": "1", "inputs": inputs, "parameters": {**options, "binary_data_output": True}}).encode()
    model = "attention_grad" if path.endswith("grad") else "attention"
    headers = {"Inference-Header-Content-Length": str(len(head)), **bearer(LOAD)}
    body = head + b"".join(array.tobytes() for array in tensors.values())
    return Question(f"/v2/models/{model}/infer", headers, body, tensors, options)


FORMS = {"safetensors": safetensors, "json": numbers, "oip": inference}


def draw(rng, form, *, grad, backend=None, length=None, heads=None, dim=None):
    """Return a random question whose tensors differ from those of all other questions."""
    length = length or int(rng.choice(LENGTHS[:3] if form == "json" else LENGTHS))
    heads, dim = heads or int(rng.choice((1, 2, 4))), dim or int(rng.choice((8, 32, 64)))
    kv_length = max(1, length + int(rng.integers(-3, 4)))
    shapes = {"q": (1, heads, length, dim), "k": (1, heads, kv_length, dim), "v": (1, heads, kv_length, dim)}
    if grad:
        shapes["do"] = shapes["q"]
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    options: dict[str, Any] = {"causal": bool(rng.integers(2))}
    if backend:
        options["backend"] = backend
    return FORMS[form](tensors, options, "/attention/grad" if grad else "/attention")


def ask_alone(port, question):
    """Send a question to an idle service, and store the answer in it."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("POST", question.path, question.body, question.headers)
        response = connection.getresponse()
        question.right = response.read()
    assert response.status == 200, question.right
    if question.headers.get("Content-Type") == SAFETENSORS:
        _, question.answer = parsed(question.right)


def parsed(body):
    """Return the metadata and tensors of a safetensors message."""
    head = wire.parse_head(body[: wire.head_size(body[:8])])
    return wire.decode_options(head.metadata), forms.SAFETENSORS.read({}, body)
