"""Fuzz targets: functions that read any bytes as a message, and check that it can be written and read unchanged.

The documented errors for an invalid message are caught where they may occur: WireError, FieldError, ProblemError, and
Refusal with a status of 4xx. A target that raises anything has found a bug. `bounded` limits time and memory, too.
"""

from __future__ import annotations

import asyncio
import atexit
import gzip
import json
import math
import pickle
import time
import tracemalloc
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from flashpoint_contract import strictjson, wire
from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.verify import VerifyRequest
from flashpoint_contract.tensors import INDEX_TENSORS, TensorInfo
from flashpoint_kernels.problems.cost import NOMINAL
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.formats.message import read_model
from flashpoint_server.formats.negotiation import SERVED, answer_format, request_format
from flashpoint_server.formats.safetensors import SAFETENSORS
from flashpoint_server.http.body import RequestBody
from flashpoint_server.http.request import Request, combined
from flashpoint_server.ipc.bodies import read_planned
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.regions import Regions
from flashpoint_server.oip import head as oip_head
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.infer import HttpMessage
from flashpoint_server.oip.inflated import InflatedBody
from flashpoint_server.oip.memory_routes import Registration
from flashpoint_server.plan import MessageHead, Plan, Plans, apart, checked_options
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import deadline_of, priority_of

T = TypeVar("T")

LONGEST = 4096  # bytes of an input; longer inputs would be slower and reach no more code
SECONDS = 2.0  # limit of the CPU time for one input: a hundred times the time of the slowest input
# The memory for one input is limited to BYTES, and BYTES_EACH more for each byte of the input. Parsed JSON takes the
# most: `{},` has 3 bytes, but its Python object has 64 bytes and a pointer.
BYTES, BYTES_EACH = 1 << 20, 256

SETTINGS = Settings(body_limit=1 << 16, json_limit=1 << 16)


class _Here(Codecs):
    """Calls every function in this process."""

    async def parse(self, body: RequestBody, function: Any, text: bytes, *arguments: Any, here: int = 0) -> Any:
        return function(text, *arguments)


CODECS = _Here()
DEVICE_MEMORY = 1 << 20
DEVICE = DeviceInfo("cpu", "none", DEVICE_MEMORY, ("cpu", "tiled", "reference"), 1e9, NOMINAL)
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PLANS = Plans(SETTINGS)

_loop = asyncio.new_event_loop()
atexit.register(_loop.close)


def bounded(target: Callable[[bytes], None], data: bytes, max_seconds: float = SECONDS) -> None:
    """Run `target` on `data`; assert that CPU time is below `max_seconds`, and memory below the limit for `data`."""
    tracemalloc.start()
    try:
        start = time.thread_time()
        target(data)
        seconds, peak = time.thread_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < max_seconds, f"{seconds:.1f} s for {len(data)} bytes"
    assert peak < BYTES + BYTES_EACH * len(data), f"{peak} bytes of memory for {len(data)} bytes"


# Helpers of all targets


def refused(call: Callable[[], T]) -> T | None:
    """Return the result of `call`, or None if it raises a Refusal, whose status and document are checked."""
    try:
        return call()
    except Refusal as refusal:
        caught = refusal
    assert 400 <= caught.status < 500, caught.status
    document = json.loads(caught.body("id"))
    assert document["code"] == caught.code
    assert caught.code != "invalid_request" or all(e["loc"][0] and e["msg"] for e in document["errors"])
    return None


def read(function: Callable[[bytes], T], data: bytes) -> T | None:
    """Return the result of `function`, pickled and unpickled as for the JSON process, or None if `data` is invalid."""
    try:
        return crossed(function(data))
    except (wire.WireError, jsonwire.FieldError) as error:
        caught = error
    assert str(crossed(caught)) == str(caught)
    return None


def served(coroutine: Coroutine[Any, Any, T]) -> T | None:
    return refused(lambda: _loop.run_until_complete(coroutine))


def body_of(data: bytes, kind: Callable[..., RequestBody] = RequestBody, *more: Any) -> RequestBody:
    """Return a request body that gets `data` in pieces, as from an ASGI server. `data` determines the pieces' size."""
    step = 1 + zlib.crc32(data) % max(1, len(data))
    pieces = iter([data[i : i + step] for i in range(0, len(data), step)])

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    return kind({}, receive, {}, SETTINGS, *more)


def crossed(value: T) -> T:
    """Return the value after pickling and unpickling, as the server's JSON process returns it."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


def same_tensors(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        x, y = (t if t.dtype.kind in "biu" else t.astype(np.float64) for t in (x, y))
        assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name
        if x.dtype.kind == "f":
            assert np.array_equal(np.signbit(x) & (x == 0), np.signbit(y) & (y == 0)), name


def _raise(error: Exception) -> None:
    raise error


def planned(tensors: Mapping[str, TensorInfo], options: Mapping[str, Any], direction: Direction, surface: str) -> Plan:
    """Return the plan of a plain call in the format `surface`. Raises Refusal."""
    message = MessageHead()
    message.inputs, message.options, message.surface = tuple(tensors.items()), options, surface
    message.checked, _ = apart(checked_options(tensors, options, direction, "plain", surface)[0])
    message.direction = direction
    return PLANS.of(message, DEVICE)


def use(plan: Plan, index: Mapping[str, list[int]]) -> None:
    """Read and check the properties of a plan that the service reads for a request."""
    spec = plan.spec
    assert spec.input_bytes >= 0
    assert spec.flops >= 0
    assert spec.level in (0, 1, 2)
    assert all(info.nbytes >= 0 for info in spec.outputs.values())
    assert read_planned(plan.packed).options == spec.options
    try:
        hash(launch_key(spec, plan.backend))
        if spec.footprint <= DEVICE_MEMORY and index.keys() == set(INDEX_TENSORS) & spec.tensors.keys():
            rows = spec.rows(index)
            assert len(rows) == spec.batch
            assert all(0 <= r.q_len <= r.q_rows and 0 <= r.kv_len <= r.kv_rows for r in rows)
    except ProblemError as error:
        refused(partial(_raise, invalid(error.errors)))


# The targets


def safetensors(data: bytes) -> None:
    """Read `data` as a whole safetensors message; then as the JSON of a message's header, with tensors of zeros."""
    _message(data)
    head = len(data).to_bytes(8, "little") + data
    try:
        parsed = wire.parse_head(head)
    except wire.WireError:
        _message(head)
        return
    rebuilt = wire.build_head([(t.name, t.dtype, t.shape) for t in parsed.tensors], parsed.metadata)
    again = wire.parse_head(rebuilt)
    assert (again.tensors, again.metadata, again.data_size) == (parsed.tensors, parsed.metadata, parsed.data_size)
    _message(head + bytes(min(parsed.data_size, LONGEST)))


def _message(data: bytes) -> None:
    for direction in DIRECTIONS:
        served(_received(data, direction))


async def _received(data: bytes, direction: Direction) -> None:
    request = Request("POST", "/attention", {}, "id")
    request.body = body_of(data)
    message = await SAFETENSORS.read(request, SETTINGS, CODECS, None)
    given = message.inputs
    plan = planned(dict(given), message.options, direction, message.surface)
    memory = bytearray(sum(info.nbytes for _, info in given))
    places, end = {}, 0
    for name, info in given:
        places[name] = memoryview(memory)[end : end + info.nbytes]
        end += info.nbytes
    await message.receive(request, places)
    assert memory == data[len(data) - len(memory) :]
    index = {name: np.frombuffer(places[name], info.dtype).tolist() for name, info in given if name in INDEX_TENSORS}
    use(plan, index)
    options = wire.decode_options(wire.encode_options(message.options))
    assert planned(dict(given), options, direction, message.surface) is plan


def json_message(data: bytes) -> None:
    """Read `data` as a JSON message of tensors and options."""
    if (message := read(jsonwire.decode, data)) is None:
        return
    tensors, options = message
    infos = {name: TensorInfo(array.dtype.name, array.shape) for name, array in tensors.items()}
    for direction in DIRECTIONS:
        plan = refused(partial(planned, infos, options, direction, "json"))
        if plan is not None:
            use(plan, {name: t.ravel().tolist() for name, t in tensors.items() if name in INDEX_TENSORS})
    dtype = strictjson.loads(data).get("dtype", "float32")
    again, left = jsonwire.decode(jsonwire.encode(tensors, {"dtype": dtype}))
    assert not left
    same_tensors(tensors, again)


def inference(data: bytes) -> None:
    """Read `data` as the JSON of an infer request of the Open Inference Protocol."""
    if (head := read(oip_head.parse, data)) is None:
        return
    assert head.data_size >= 0
    assert 0 <= head.priority < oip_head.PRIORITY_LEVELS
    for direction in DIRECTIONS:
        plan = refused(partial(_plan_of, head, direction))
        wanted = None if plan is None else refused(partial(head.wanted, plan.answers))
        if plan is not None and wanted is not None:
            assert {output.name for output in wanted} <= plan.answers.keys()
            index = {i.name: i.array.ravel().tolist() for i in head.inputs if i.array is not None}
            use(plan, {name: values for name, values in index.items() if name in INDEX_TENSORS})
    if math.inf in map(abs, filter(_is_number, head.options.values())):
        return  # JSON cannot write an infinity, so the request cannot be written again
    again = oip_head.parse(_written(head))
    for field in ("id", "outputs", "options", "timeout", "priority"):
        assert getattr(again, field) == getattr(head, field), field
    for one, other in zip(head.inputs, again.inputs, strict=True):
        assert one._replace(array=None) == other._replace(array=None)
        assert (one.array is None) == (other.array is None)
        if one.array is not None:
            same_tensors({one.name: one.array}, {other.name: other.array})


def _plan_of(head: oip_head.InferHead, direction: Direction) -> Plan:
    return PLANS.of(HttpMessage(head, Regions(0, None), "", direction), DEVICE)


def _is_number(value: Any) -> bool:
    return isinstance(value, float)


_SHARED = {"region": "shared_memory_region", "offset": "shared_memory_offset", "size": "shared_memory_byte_size"}


def _written(head: oip_head.Head) -> bytes:
    """Return the JSON of an infer request that is equal to `head`."""

    def shared(at: Any) -> dict[str, Any]:
        return {} if at is None else {_SHARED[k]: v for k, v in at._asdict().items()}

    def tensor(given: oip_head.Input) -> dict[str, Any]:
        entry = {"name": given.name, "shape": list(given.info.shape), "datatype": DATATYPE_OF[given.info.dtype]}
        if given.array is not None:
            return entry | {"data": jsonwire.listed(given.array)}
        return entry | {"parameters": shared(given.shared) or {"binary_data_size": given.size}}

    options = dict(head.options)
    left, right = options.pop("window", (None, None))
    window = {"window_left": left, "window_right": right} if left is not None or right is not None else {}
    grads = {"grads": ",".join(options.pop("grads"))} if "grads" in options else {}
    priority = {"priority": oip_head.PRIORITY_LEVELS - head.priority} if head.priority else {}
    request = {
        "id": head.id,
        "parameters": {**options, **window, **grads, **priority, "timeout": head.timeout},
        "inputs": [tensor(given) for given in head.inputs],
        "outputs": [
            {"name": o.name, "parameters": {"binary_data": o.binary, **shared(o.shared)}} for o in head.outputs
        ],
    }
    return json.dumps(request).encode()


_NUMBERS = ("scale", "softcap", "dropout_p")  # floats, which JSON may write as integers


def documents(data: bytes) -> None:
    """Read `data` as the JSON body of /verify, of /benchmark and of a shared-memory registration, and as options.

    `AttentionOptions` and `Options` must accept the same options.
    """
    for model in (VerifyRequest, BenchmarkRequest, Registration):
        model_value = served(read_model(body_of(data), model, SETTINGS.json_limit, CODECS))
        if model_value is not None:
            assert model.model_validate_json(model_value.model_dump_json()) == model_value
    try:
        options = strictjson.loads(data)
    except ValueError:
        return
    if not isinstance(options, dict):
        return
    try:
        checked = AttentionOptions.model_validate(options)
    except ValidationError:
        checked = None
    try:
        options_value = Options(**options)
    except (ProblemError, TypeError):  # TypeError: an unknown option
        options_value = None
    assert (checked is None) == (options_value is None), (checked, options_value)
    if checked is not None and options_value is not None:
        numbers = {
            name: float(value) for name, value in vars(options_value).items() if name in _NUMBERS and value is not None
        }
        assert Options(**checked.model_dump()) == replace(options_value, **numbers)
        tensor = TensorInfo("float32", (2, 3))
        infos = dict.fromkeys(("q", "k", "v"), tensor)
        travelled = wire.decode_options(wire.encode_options(checked.model_dump(mode="json")))
        one, other = (refused(partial(planned, infos, o, "forward", "safetensors")) for o in (options, travelled))
        assert one is other


def compressed(data: bytes) -> None:
    """Read a body with each Content-Encoding: `data` itself, which is usually invalid, and `data` compressed."""
    for coding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        served(body_of(data, InflatedBody, coding).text())
        assert served(body_of(pack(data), InflatedBody, coding).text()) == data


def headers(data: bytes) -> None:
    """Read `data` as the header fields of a request, one per line."""
    fields = combined(tuple(line.partition(b":")[::2]) for line in _lines(data))
    given = refused(lambda: request_format(fields))
    if given is not None:
        assert given.media_type in SERVED
        wanted = refused(lambda: answer_format(fields, given))
        assert wanted is None or wanted.media_type in (*SERVED, "application/octet-stream")
    refused(lambda: deadline_of(fields, SETTINGS))
    priority = refused(lambda: priority_of(fields))
    assert priority is None or priority in range(10)
    length = RequestBody({}, None, fields, SETTINGS).length  # type: ignore[arg-type]
    assert length is None or (length >= 0 and math.isfinite(length))


def _lines(data: bytes) -> Iterator[bytes]:
    return (line for line in data.split(b"\n") if b":" in line)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (safetensors, json_message, inference, documents, compressed, headers)
}
