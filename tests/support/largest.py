"""The largest bodies that the server's limits allow, for each route and field: derived from its models and tables."""

import itertools
import json
import string

from flashpoint_contract import wire
from flashpoint_contract.caches import CACHE_OPTIONS, ID_LENGTH, MOST_CACHES
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.saved import SAVED_OPTIONS
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_contract.schemas.verify import VerifyRequest
from flashpoint_server.routes.tensors.cache_schema import CacheRequest, DeleteRequest, ForkRequest, TruncateRequest
from flashpoint_server.routes.tensors.caches import REQUEST_LIMIT
from flashpoint_server.routes.timing.benchmark import REQUEST_LIMIT as BENCHMARK_LIMIT
from flashpoint_server.routes.verify import DRAWN_LIMIT
from tests.support.messages import JSON, SAFETENSORS

MODELS = {
    "/caches": (CacheRequest, REQUEST_LIMIT),
    "/caches/fork": (ForkRequest, REQUEST_LIMIT),
    "/caches/delete": (DeleteRequest, REQUEST_LIMIT),
    "/caches/{id}/truncate": (TruncateRequest, REQUEST_LIMIT),
    "/benchmark": (BenchmarkRequest, BENCHMARK_LIMIT),
    "/verify": (VerifyRequest, DRAWN_LIMIT),
}
TENSOR_ROUTES = ("/attention", "/attention/grad", "/verify", "/caches/{id}/append")
CALL_OPTIONS = (*OPTIONS, *CACHE_OPTIONS, *SAVED_OPTIONS)
INFER = "/v2/models/attention/infer"
# Values that fill a number of bytes: many wrong items, deep items, objects with many names, and one long string.
KINDS = {
    "words": lambda size: filled('"x"', size),
    "objects": lambda size: filled("{}", size),
    "numbers": lambda size: filled("1", size),
    "names": lambda size: f"{{{names(size)}}}",
    "string": lambda size: f'"{"x" * size}"',
}


def filled(item, size):
    return f"[{','.join([item] * (size // (len(item) + 1)))}]"


def names(size):
    """Return the fields of a JSON object with as many different names as fit into `size` bytes."""
    letters = itertools.product(string.ascii_lowercase, repeat=5)
    return ",".join(f'"{"".join(name)}":1' for name in itertools.islice(letters, size // 10))


def largest_documents(most):
    """Yield (name, path, media type, body) of JSON bodies, with at most `most` bytes each."""
    for path, (model, limit) in MODELS.items():
        size = min(limit, most) - 64
        yield f"{path} unknown names", path, JSON, f"{{{names(size)}}}"
        for field, kind in itertools.product(model.model_fields, KINDS):
            yield f"{path} {field} {kind}", path, JSON, f'{{"{field}":{KINDS[kind](size)}}}'
    lists = {"kv_heads": 512, "head_dim": 512, "value_dim": 512, "keep": 512}
    wrong = {name: ["x"] * count for name, count in lists.items()}
    yield "/caches four lists of wrong items", "/caches", JSON, json.dumps(wrong)
    ids = ["x" * ID_LENGTH] * (min(MOST_CACHES, most // ID_LENGTH // 2) or 1)
    yield "/caches/delete ids", "/caches/delete", JSON, json.dumps({"caches": ids})
    yield "/caches/fork ids", "/caches/fork", JSON, json.dumps({"caches": ids, "free": ids})
    yield "/attention ids", "/attention", JSON, json.dumps({"q": [[1]], "caches": ids})
    for path in TENSOR_ROUTES:
        yield f"{path} unknown options", path, JSON, f"{{{names(most - 64)}}}"
    for path, option in itertools.product(TENSOR_ROUTES[:2], CALL_OPTIONS):
        for kind in KINDS:
            yield f"{path} {option} {kind}", path, JSON, f'{{"q":[[1]],"{option}":{KINDS[kind](most - 64)}}}'


def largest_heads(most=wire.HEAD_LIMIT):
    """Yield (name, path, media type, body) of bodies that are a head in safetensors."""
    size = min(most, wire.HEAD_LIMIT) - 256
    for path, option in itertools.product(TENSOR_ROUTES, CALL_OPTIONS):
        for kind in ("words", "numbers"):
            value = KINDS[kind](size // 2 if kind == "words" else size)  # quotes are escaped
            yield f"{path} {option} {kind} in a head", path, SAFETENSORS, head({"__metadata__": {option: value}})
    metadata = {f"option-{n}": "[" + "1," * (size // 200) + "1]" for n in range(64)}
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for path in TENSOR_ROUTES:
        yield f"{path} options in a head", path, SAFETENSORS, head({"__metadata__": metadata})
        yield f"{path} tensors", path, SAFETENSORS, head({f"{n}{'x' * (size // 80)}": entry for n in range(64)})
        yield f"{path} objects", path, SAFETENSORS, head({"q": [{}] * (size // 4)})


def head(entries):
    text = json.dumps(entries, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def largest_inferences(most):
    """Yield (name, path, media type, body) of inferences under /v2."""
    for kind in KINDS:
        for field in ("inputs", "outputs", "parameters", "id"):
            yield f"/v2 {field} {kind}", INFER, JSON, f'{{"inputs":[],"{field}":{KINDS[kind](most - 64)}}}'
    yield "/v2 a parameter", INFER, JSON, f'{{"inputs":[],"parameters":{{"causal":"{"x" * (most - 64)}"}}}}'
    yield "/v2 names", INFER, JSON, f"{{{names(most - 64)}}}"
