"""The requests that the load tests send: their bytes, made in advance, and their right answers, computed in float64."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import forms
from flashpoint_contract import wire
from flashpoint_contract.schemas import jsonwire

Array = NDArray[Any]

BOUND = 5e-6  # allowed error of a float32 answer against float64, as a fraction of the answer's largest value
MIXED_LENGTHS = (8, 17, 40, 64, 100, 129, 200, 256, 333, 512)  # many short, a few long; few are multiples of a tile
DECODE_KEYS = 2048
WRONG = "wrong answer"  # how the errors of wrong answers begin in a load test's results


class WrongAnswerError(Exception):
    """The content of an answer is wrong."""


SAFETENSORS, JSON, OIP = wire.MEDIA_TYPE, jsonwire.MEDIA_TYPE, "application/octet-stream"  # the values of `Case.form`


@dataclass(frozen=True)
class Case:
    """One request, and the tensors of its right answer."""

    path: str
    form: str
    headers: Mapping[str, str]
    body: bytes
    expected: Mapping[str, Array]

    def check(self, content: bytes) -> None:
        """Check `content`, the body of the answer. Raises WrongAnswerError."""
        tensors = read(content, self.form)
        for name, right in self.expected.items():
            if name not in tensors or tensors[name].shape != right.shape:
                raise WrongAnswerError(f"{name} is missing, or of another shape")
            error = np.abs(tensors[name] - right).max() / np.abs(right).max()
            if not error <= BOUND:
                raise WrongAnswerError(f"{name} is wrong by {error:.1e} of its largest value")


def make(
    q_len: int, kv_len: int, dim: int, *, heads: int = 8, kv_heads: int = 8, causal: bool = True, grad: bool = False,
    form: str = SAFETENSORS, seed: int = 0,
) -> Case:  # fmt: skip
    """Return a request with random float32 q (1,heads,q_len,dim), k and v (1,kv_heads,kv_len,dim)."""
    rng = np.random.default_rng((seed, q_len, kv_len))
    shapes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len)}
    if grad:
        shapes["do"] = shapes["q"]
    tensors = {n: rng.standard_normal((1, *shape, dim)).astype(np.float32) for n, shape in shapes.items()}
    expected = forms.truth(tensors, causal)
    headers = {"Content-Type": form}
    if form == OIP:
        path = f"/v2/models/attention{'_grad' if grad else ''}/infer"
        head, data = oip(tensors, {"causal": causal, "binary_data_output": True}, "inputs")
        return Case(path, form, {**headers, "Inference-Header-Content-Length": str(len(head))}, head + data, expected)
    path = "/attention/grad" if grad else "/attention"
    return Case(path, form, headers, write(tensors, {"causal": causal}, form), expected)


def write(tensors: Mapping[str, Array], options: Mapping[str, Any], form: str) -> bytes:
    """Return a message in JSON or safetensors."""
    return jsonwire.encode(tensors, options) if form == JSON else forms.SAFETENSORS.whole(tensors, **options)[1]


def oip(tensors: Mapping[str, Array], options: Mapping[str, Any], role: str) -> tuple[bytes, bytes]:
    """Return the head and the data of a message of the Open Inference Protocol; `role` is inputs or outputs."""
    heads = [
        {"name": n, "shape": t.shape, "datatype": "FP32", "parameters": {"binary_data_size": t.nbytes}}
        for n, t in tensors.items()
    ]
    return json.dumps({role: heads, "parameters": options}).encode(), b"".join(t.tobytes() for t in tensors.values())


def read(content: bytes, form: str) -> dict[str, Array]:
    """Return the tensors of an answer. Raises WrongAnswerError."""
    try:
        if form == JSON:
            return jsonwire.decode(content)[0]
        if form == OIP:
            return _read_oip(content)
        size = wire.head_size(content[:8])
        head = wire.parse_head(content[:size])
        if len(content) != head.size + head.data_size:
            raise WrongAnswerError(f"{len(content)} bytes of {head.size + head.data_size} came")
    except ValueError as error:  # the errors of `wire` are ValueErrors
        raise WrongAnswerError(str(error)) from None
    data = memoryview(content)[size:]
    return {t.name: np.frombuffer(data[t.start : t.stop], np.float32).reshape(t.shape) for t in head.tensors}


def _read_oip(content: bytes) -> dict[str, Array]:
    """Return the tensors of an answer: a JSON head, perhaps spaces, then the tensors' bytes. Raises ValueError."""
    head, end = json.JSONDecoder().raw_decode(content[:4096].decode("latin-1"))
    tensors, start = {}, len(content) - sum(output["parameters"]["binary_data_size"] for output in head["outputs"])
    if start < end:
        raise ValueError(f"{end - start} bytes are missing")
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        tensors[output["name"]] = np.frombuffer(content[start : start + size], np.float32).reshape(output["shape"])
        start += size
    return tensors


# The requests of each kind of caller.
CASES: dict[str, list[Case]] = {
    "forward": [make(128, 128, 64, causal=causal) for causal in (True, False)],
    "gradient": [make(128, 128, 64, heads=4, kv_heads=4, causal=causal, grad=True) for causal in (True, False)],
    "mixed": [make(n, n, 64, heads=4, kv_heads=2, grad=n % 2 == 0) for n in MIXED_LENGTHS],
    "decode": [make(1, DECODE_KEYS, 64, kv_heads=2, seed=seed) for seed in range(3)],
    "json": [make(16, 16, 16, heads=2, kv_heads=2, form=JSON)],
    "oip": [make(128, 128, 64, grad=grad, form=OIP) for grad in (False, True)],
}
