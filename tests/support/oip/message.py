"""Requests and answers of the Open Inference Protocol, with http.client, json and torch, and without our code."""

import contextlib
import gzip
import http.client
import json
import urllib.parse
import zlib
from dataclasses import dataclass

import torch

DATATYPES = {
    "BOOL": torch.bool,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
LENGTH = "inference-header-content-length"
PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def head(self):
        return json.loads(self.body[: int(self.headers.get(LENGTH, len(self.body)))])

    @property
    def error(self):
        assert self.headers["content-type"] == "application/json"
        document = json.loads(self.body)
        assert document.keys() == {"error"}, document
        assert isinstance(document["error"], str)
        return document["error"]

    @property
    def tensors(self):
        """Return all outputs, in the order of the answer."""
        assert self.status == 200, self.body
        outputs, start = {}, int(self.headers.get(LENGTH, len(self.body)))
        for output in self.head["outputs"]:
            dtype = DATATYPES[output["datatype"]]
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                numbers = torch.tensor([float(x) for x in output["data"]], dtype=torch.float64)
            elif not size:
                numbers = torch.empty(0)
            else:
                numbers = torch.frombuffer(bytearray(self.body[start : start + size]), dtype=dtype)
                start += size
            outputs[output["name"]] = numbers.to(dtype).reshape(output["shape"])
        assert start == len(self.body)
        return outputs


def raw(t):
    return (
        t.contiguous().view(torch.uint8).numpy().tobytes()
        if t.dim()
        else t.reshape(1).view(torch.uint8).numpy().tobytes()
    )


def entry(name, t, binary=True):
    """Return the entry of an input in the JSON head."""
    head = {"name": name, "shape": list(t.shape), "datatype": NAMES[t.dtype]}
    if binary:
        return {**head, "parameters": {"binary_data_size": t.numel() * t.element_size()}}
    return {**head, "data": t.flatten().tolist()}


def wanted(name, **parameters):
    return {"name": name, **({"parameters": parameters} if parameters else {})}


def request(tensors, *, outputs=None, parameters=None, numbers=(), **more):
    """Return (JSON head, binary tensors) of a request; the tensors that `numbers` names are numbers in the JSON."""
    head = {"inputs": [entry(n, t, n not in numbers) for n, t in tensors.items()], **more}
    if outputs is not None:
        head["outputs"] = outputs
    if parameters is not None:
        head["parameters"] = parameters
    return json.dumps(head).encode(), b"".join(raw(t) for n, t in tensors.items() if n not in numbers)


def call(url, method, path, body=None, **headers):
    """Send a request; `content_encoding="gzip"` sets the header Content-Encoding."""
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    where = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, timeout=600)) as connection:
        connection.putrequest(method, where.path + path, skip_accept_encoding=True)
        chunked = body is not None and not isinstance(body, bytes)
        if chunked:
            named["Transfer-Encoding"] = "chunked"
        elif body is not None:
            named["Content-Length"] = str(len(body))
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders(body, encode_chunked=chunked)
        response = connection.getresponse()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def infer(url, model, tensors, *, coding=None, headers=None, **how):
    """Send an inference request; `coding` is the compression of its body, gzip or deflate."""
    head, data = request(tensors, **how)
    headers = dict(headers or {})
    if data:
        headers[LENGTH] = len(head)
    body = head + data
    if coding:
        body, headers["content-encoding"] = PACK[coding](body), coding
    return call(url, "POST", f"/v2/models/{model}/infer", body, **headers)
