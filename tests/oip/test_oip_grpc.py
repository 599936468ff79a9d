"""The protocol over gRPC works with NVIDIA's unmodified client, has the bits of HTTP, and refuses wrong calls."""

import asyncio
import contextlib
import json
import re
import secrets
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.wire import WireError
from flashpoint_kernels import native
from flashpoint_server.cli import serve
from flashpoint_server.oip.grpc import protos
from flashpoint_server.oip.grpc.framing import before, split
from flashpoint_server.oip.grpc.request import RAW_INPUTS, parse
from flashpoint_server.oip.grpc.server import STATUSES, _end
from flashpoint_server.refusal import STATUS
from tests.support.messages import read_metrics
from tests.support.oip.cases import CASES, REFUSED, ask, judge
from tests.support.oip.grpc_calls import HANG, Caller, Request, port_of, refused, request
from tests.support.oip.message import infer, raw
from tests.support.oip.problem import GRAD, problem

MIB = 1 << 20
CLIENTS = Path(__file__).parent / "clients"
SMALL = problem()
SIZE = len(raw(SMALL["q"]))
METHOD = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server(rpc_server):
    return rpc_server


@pytest.fixture(scope="module")
def caller(server):
    caller = Caller(port_of(server))
    yield caller
    caller.close()


@pytest.mark.parametrize("kind", [pytest.param("sync", marks=pytest.mark.slow), "asyncio"])
def test_tritonclient(server, kind, tmp_path):
    program = [sys.executable, CLIENTS / "triton_grpc_client.py", kind]
    report, answers = ask(program, tmp_path, f"127.0.0.1:{port_of(server)}", CASES)
    statuses = {"422": "INVALID_ARGUMENT", "404": "NOT_FOUND", "504": "DEADLINE_EXCEEDED"}
    judge(report, answers, CASES, {name: (statuses[status], word) for name, (status, word) in REFUSED.items()})
    assert report["ready"] == [True, True, True]
    assert [tensor["name"] for tensor in report["metadata"]["inputs"]][:3] == ["q", "k", "v"]
    assert report["metadata"]["inputs"][0]["shape"] == ["-1"] * 4
    assert {"binary_tensor_data", "system_shared_memory"} <= set(report["server"]["extensions"])
    config = report["config"]["config"]
    assert config["name"] == "attention_grad"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["dynamic_batching"]["priority_levels"] == "10"
    assert config["parameters"]["causal"]["string_value"] == "false"
    assert {model["name"]: model["state"] for model in report["index"]["models"]} == {
        "attention": "READY",
        "attention_grad": "READY",
    }
    counts = {model["name"]: int(model["inference_count"]) for model in report["stats"]["model_stats"]}
    assert counts["attention"] >= sum(one["model"] == "attention" for one in CASES) - 4
    assert report["async_infer"] == [CASES[0]["name"]] * 4


def test_the_example_of_the_page(server):
    page = (CLIENTS.parents[2] / "docs" / "oip.md").read_text().partition("Over gRPC:")[2]
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    code = code.replace("localhost:8001", f"localhost:{port_of(server)}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_our_messages_are_the_protocols_own():
    """One process can load both definitions."""
    program = CLIENTS / "proto_differences.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_descriptor_set_is_of_the_files(tmp_path):
    """If this fails, run `make protos`."""
    folder, made = Path(protos.__file__).parent, tmp_path / "made"
    protoc = Path(sys.executable).with_name("protoc")
    subprocess.run(
        [protoc, "-I", folder, f"--descriptor_set_out={made}", "inference.proto", "health.proto"], check=True
    )
    assert made.read_bytes() == (folder / "descriptors.binpb").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("model", ["attention", "attention_grad"])
def test_an_answer_has_the_bits_that_it_has_over_http(server, caller, model, dtype):
    tensors = problem(dtype, GRAD if model == "attention_grad" else "qkv")
    options = {"causal": True, "window_left": 7, "dropout_p": 0.25, "dropout_seed": 1 << 62}
    if model == "attention":
        options["return_lse"] = True
    ours = caller.infer(request(tensors, model=model, id="ours", **options))
    theirs = infer(server.url, model, tensors, parameters={**options, "binary_data_output": True})
    assert ours.bits == {name: raw(t) for name, t in theirs.tensors.items()}
    assert ours.message.id == "ours"
    assert ours.message.model_version == "1"
    assert ours.message.parameters["backend"].string_param == ours.beside["x-backend"] == theirs.headers["x-backend"]
    kernel = native.names().get(str(dtype).removeprefix("torch."))  # None for the backend `reference`
    assert ours.beside.get("x-kernel") == theirs.headers.get("x-kernel") == kernel
    assert ("kernel" in ours.message.parameters) == (kernel is not None)
    assert ours.message.parameters["dropout_seed"].int64_param == options["dropout_seed"]
    assert ours.beside["x-batch-size"] == "1"
    assert ours.beside["server-timing"].startswith("decode;dur=")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_taken_and_given_and_are_the_same_as_bytes(caller, dtype):
    tensors = problem(dtype) | {
        "attn_mask": torch.ones(24, 24, dtype=torch.bool).tril(),
        "kv_lengths": torch.tensor([20]),
    }
    outputs = ("lse", "o")
    expected = caller.infer(request(tensors, outputs=outputs)).bits
    numbers = caller.infer(request(tensors, typed=True, outputs=outputs)).numbers
    dtypes = {"o": dtype, "lse": torch.float32}
    assert {name: raw(torch.tensor(numbers[name], dtype=dtypes[name])) for name in outputs} == expected
    assert caller.infer(request(tensors, typed=True, outputs=outputs, binary_data_output=True)).bits == expected
    assert caller.infer(request(tensors, outputs=outputs, binary_data_output=False)).numbers == numbers


def test_what_clients_say_of_bytes_is_taken(caller):
    """By default KServe's client sends the size of each input; for each output it can request bytes or numbers."""
    expected = caller.infer(request(SMALL)).bits
    message = sized(SIZE)
    message.outputs.add(name="o").parameters["binary_data"].bool_param = True
    assert caller.infer(message).bits == expected
    numbers = caller.infer(request(SMALL, outputs=["o"], wanted={"o": {"binary_data": False}})).numbers["o"]
    assert raw(torch.tensor(numbers)) == expected["o"]


def test_cuda_shared_memory_is_off(caller):
    """Triton's clients unregister it first."""
    caller.ask("CudaSharedMemoryUnregister")
    caller.ask("CudaSharedMemoryUnregister", name="any")
    assert not caller.ask("CudaSharedMemoryStatus").regions


def test_long_numbers_are_read_and_written_too(caller):
    tensors = {name: torch.linspace(0, 1, 4 * 128 * 32).reshape(4, 128, 32) for name in "qkv"}
    expected = caller.infer(request(tensors)).bits["o"]
    numbers = caller.infer(request(tensors, typed=True)).numbers["o"]
    assert raw(torch.tensor(numbers)) == expected


def test_empty_tensors_have_empty_answers(caller):
    tensors = {"q": torch.empty(0, 4), "k": torch.ones(3, 4), "v": torch.ones(3, 2)}
    for typed in (False, True):
        answer = caller.infer(request(tensors, typed=typed, binary_data_output=True))
        assert answer.bits == {"o": b""}
        assert list(answer.message.outputs[0].shape) == [0, 2]


def test_tensors_in_shared_memory_never_move(server, caller):
    size = len(raw(SMALL["q"]))
    key = "flashpoint-test-" + secrets.token_hex(8)
    block = shared_memory.SharedMemory(key, create=True, size=4 * size)
    try:
        block.buf[: 3 * size] = b"".join(raw(t) for t in SMALL.values())
        caller.ask("SystemSharedMemoryRegister", name="mine", key=f"/{key}", byte_size=4 * size)
        regions = caller.ask("SystemSharedMemoryStatus").regions
        assert (regions["mine"].byte_size, regions["mine"].key) == (4 * size, "")
        places = [
            {"shared_memory_region": "mine", "shared_memory_byte_size": size, "shared_memory_offset": i * size}
            for i in range(4)
        ]
        inputs = dict(zip("qkv", places, strict=False))
        expected = caller.infer(request(SMALL, outputs=["o", "lse"])).bits
        answer = caller.infer(request(SMALL, inputs=inputs, outputs=["o", "lse"], wanted={"o": places[3]}))
        assert answer.bits == {"o": b"", "lse": expected["lse"]}
        assert answer.message.outputs[0].parameters["shared_memory_offset"].int64_param == 3 * size
        assert bytes(block.buf[3 * size :]) == expected["o"]
        with refused("INVALID_ARGUMENT", f"must be {size} bytes for this shape and datatype, not 8"):
            caller.infer(request(SMALL, inputs=inputs | {"q": places[0] | {"shared_memory_byte_size": 8}}))
        del inputs["k"]  # the message has it
        alone = caller.infer(request(SMALL, inputs=inputs, outputs=["o"], wanted={"o": places[3]}))
        assert not alone.message.raw_output_contents
        caller.ask("SystemSharedMemoryUnregister", name="mine")
        with refused("INVALID_ARGUMENT", "mine"):
            caller.infer(request(SMALL, inputs=inputs))
        with refused("NOT_FOUND", "mine"):
            caller.ask("SystemSharedMemoryStatus", name="mine")
        caller.ask("SystemSharedMemoryUnregister", name="mine")  # a repeat has no effect
        with refused("INVALID_ARGUMENT", "name"):
            caller.ask("SystemSharedMemoryRegister", name="a/b", key=f"/{key}", byte_size=1)
    finally:
        caller.ask("SystemSharedMemoryUnregister")
        block.close()
        block.unlink()


def without_raw():
    message = request(SMALL)
    del message.raw_input_contents[2:]
    return message


def short(size, datatype="FP32"):
    message = request(SMALL)
    message.inputs[0].datatype = datatype
    message.raw_input_contents[0] = b"\0" * size
    return message


def sized(size, typed=False):
    message = request(SMALL, typed=typed)
    message.inputs[0].parameters["binary_data_size"].int64_param = size
    return message


def one_raw_more():
    message = request(SMALL)
    message.raw_input_contents.append(b"")
    return message


def twice_there():
    message = request(SMALL)
    message.inputs[0].contents.fp32_contents.append(1)
    return message


def numbers_of(datatype, *numbers):
    message = request({"q": torch.zeros(1, 1)}, typed=True)
    entry = message.inputs[0]
    entry.ClearField("contents")
    entry.datatype = datatype
    entry.contents.int_contents.extend(numbers)
    return message


def many_fields():
    message = request(SMALL)
    message.raw_input_contents.extend([b""] * 1000)
    return message


def many_inputs():
    message = request({})
    for i in range(65):
        message.inputs.add(name=f"i{i}", datatype="FP32", shape=[0])
        message.raw_input_contents.append(b"")
    return message


WRONG = {
    "no such model": (lambda: request(SMALL, model="attentive"), "NOT_FOUND", "attentive"),
    "no such version": (lambda: request(SMALL, version="2"), "NOT_FOUND", "'2'"),
    "unknown option": (lambda: request(SMALL, casual=True), "INVALID_ARGUMENT", "casual"),
    "unknown tensor": (lambda: request(SMALL | {"w": SMALL["q"]}), "INVALID_ARGUMENT", "w"),
    "missing tensor": (lambda: request({"q": SMALL["q"]}), "INVALID_ARGUMENT", "k: missing"),
    "bad shape": (lambda: request(SMALL | {"k": SMALL["k"][:, :, :, :5]}), "INVALID_ARGUMENT", "k"),
    "unknown output": (lambda: request(SMALL, outputs=["p"]), "INVALID_ARGUMENT", "'p'"),
    "output twice": (lambda: request(SMALL, outputs=["o", "o"]), "INVALID_ARGUMENT", "twice"),
    "unknown datatype": (lambda: numbers_of("FP8", 1), "INVALID_ARGUMENT", "'FP8'"),
    "unknown parameter": (lambda: request(SMALL, inputs={"q": {"binary": 4}}), "INVALID_ARGUMENT", "'binary'"),
    "another size": (lambda: sized(4), "INVALID_ARGUMENT", f"size of 4, but its raw_input_contents have {SIZE}"),
    "a size of numbers": (lambda: sized(SIZE, typed=True), "INVALID_ARGUMENT", "but is not in raw_input_contents"),
    "bytes and numbers": (
        lambda: request(SMALL, outputs=["o", "lse"], wanted={"lse": {"binary_data": False}}),
        "INVALID_ARGUMENT", "same for all",
    ),
    "raw missing": (without_raw, "INVALID_ARGUMENT", "'v' has no raw_input_contents"),
    "raw of another size": (lambda: short(4), "INVALID_ARGUMENT", "'q' has 4 bytes, but FP32"),
    "raw of another type": (lambda: short(4, "INT8"), "INVALID_ARGUMENT", "'q' has 4 bytes, but INT8"),
    "raw too many": (one_raw_more, "INVALID_ARGUMENT", "1 more than the inputs"),
    "raw and numbers": (twice_there, "INVALID_ARGUMENT", "use either raw_input_contents or contents"),
    "fields": (many_fields, "INVALID_ARGUMENT", "fields"),
    "inputs": (many_inputs, "INVALID_ARGUMENT", "65 inputs"),
    "no numbers of FP16": (lambda: numbers_of("FP16", 1), "INVALID_ARGUMENT", "FP16 must be sent as raw"),
    "numbers too many": (lambda: numbers_of("INT32", 1, 2), "INVALID_ARGUMENT", "2 int_contents"),
    "number too large": (lambda: numbers_of("INT8", 300), "INVALID_ARGUMENT", "INT8"),
    "numbers of another type": (lambda: numbers_of("FP32", 1), "INVALID_ARGUMENT", "0 fp32_contents"),
    "FP16 in numbers": (
        lambda: request(problem(torch.float16), binary_data_output=False), "INVALID_ARGUMENT", "raw_output_contents",
    ),
    "numbers too long": (
        lambda: request({name: torch.zeros(100_000, 1) for name in "qkv"}, typed=True), "RESOURCE_EXHAUSTED", "without",
    ),
    "message too long": (lambda: b"\0" * (5 * MIB), "RESOURCE_EXHAUSTED", "larger than max"),
    "work too large": (
        lambda: request({"q": torch.ones(1, 1, 1 << 17, 1), "k": torch.ones(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 256)},
                        backend="reference", binary_data_output=False),
        "INVALID_ARGUMENT", "limit",
    ),
    "not protobuf": (lambda: b"\x0a\xff\xff", "INVALID_ARGUMENT", "the message ends inside"),
    "not the message": (lambda: b"\x0a\x01\xff", "INVALID_ARGUMENT", "ModelInferRequest"),
    "a group": (lambda: b"\x0b", "INVALID_ARGUMENT", "kind 3"),
    "nothing": (lambda: b"", "NOT_FOUND", "''"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_and_named(server, caller, what):
    make, status, words = WRONG[what]
    with refused(status, words) as error:
        caller.infer(make())
    if what != "message too long":
        assert "x-request-id" in dict(error[0].trailing_metadata())
    assert caller.infer(request(SMALL, causal=True)).bits  # the server goes on


def test_a_message_that_is_cut_or_marred_anywhere_is_read_or_refused():
    """An accepted message has the fields that protobuf reads."""
    small = {name: torch.ones(1, 1) for name in "qkv"}
    whole = request(small, outputs=["o"], id="cut", causal=True).SerializeToString()
    rest, tensors = split(whole, RAW_INPUTS)
    assert [bytes(tensor) for tensor in tensors] == [raw(t) for t in small.values()]
    assert rest + b"".join(before(RAW_INPUTS, len(t)) + bytes(t) for t in tensors) == whole
    read = 0
    places = range(len(whole))
    marred = (bytes([*whole[:i], byte, *whole[i + 1 :]]) for i in places for byte in (0, 127, 255))
    for message in (*(whole[:i] for i in places), *marred):
        with contextlib.suppress(WireError, FieldError):
            text, tensors = split(message, RAW_INPUTS)
            parse(text, tuple(map(len, tensors)))
            assert Request.FromString(message).raw_input_contents == [bytes(tensor) for tensor in tensors]
            read += 1
    assert read


def test_a_call_without_a_message_and_one_that_is_not_served_are_refused(caller):
    with refused("INVALID_ARGUMENT", "the call has no message"):
        caller.channel.stream_unary(METHOD)(iter(()), timeout=HANG)
    with refused("UNIMPLEMENTED"):
        caller.method("ModelStreamInfer")(b"", timeout=HANG)
    with refused("UNIMPLEMENTED"):  # a compressed message has an unknown size
        caller.infer(request({name: torch.ones(64, 64) for name in "qkv"}), compression=grpc.Compression.Gzip)
    with refused("NOT_FOUND", "nothing"):
        caller.ask("ModelReady", name="nothing")


def test_health(caller):
    health = "grpc.health.v1.Health"
    for service in ("", "inference.GRPCInferenceService"):
        assert caller.ask("Check", health, service=service).status == 1  # SERVING
    with refused("NOT_FOUND", "other"):
        caller.ask("Check", health, service="other")


def test_a_call_has_its_line_in_the_log_and_its_place_in_the_metrics(server, caller):
    before = read_metrics(server)
    metadata = (("x-request-id", "told"), ("x-priority", "9"))
    answer = caller.infer(request(SMALL), metadata=metadata)
    line = server.wait_for_request("told")
    assert (line["route"], line["status"], line["model"]) == (METHOD, 200, "attention")
    assert line["bytes_in"] == request(SMALL).ByteSize()
    assert line["bytes_out"] == answer.message.ByteSize()
    assert answer.beside["x-request-id"] == "told"
    with refused("INVALID_ARGUMENT", "X-Priority"):
        caller.infer(request(SMALL), metadata=(("x-priority", "10"),))
    after = read_metrics(server)
    for name, labels in (
        ("flashpoint_requests_total", f'reason="ok",route="{METHOD}",status="200"'),
        ("flashpoint_requests_total", f'reason="invalid_request",route="{METHOD}",status="422"'),
        ("flashpoint_model_requests_total", 'how="success",model="attention"'),
    ):
        name = f"{name}{{{labels}}}"
        assert after[name] - before.get(name, 0) == 1, name


def test_a_refusal_of_a_call_that_is_over_is_a_cancellation_and_no_error():
    """gRPC raises InternalError when it aborts a call whose client has left, and logs errors that a method raises."""

    class Gone:
        async def abort(self, code, details, metadata):
            raise grpc.aio.InternalError(details)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_end(Gone(), "INVALID_ARGUMENT", "no such message"))


@pytest.mark.slow
def test_calls_whose_deadlines_pass_during_the_refusal_are_no_errors_in_the_log(server, caller):
    """The deadlines are near the duration of a refusal; each call may end either way."""
    method, before = caller.channel.unary_unary(METHOD), len(server.lines)
    for _ in range(20):
        calls = [method.future(b"\xff", timeout=0.002 + 0.0005 * step) for step in range(50)]
        assert {call.exception(HANG).code() for call in calls} <= {
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.INVALID_ARGUMENT,
        }
    answer = caller.infer(request(SMALL))
    server.wait_for_request(answer.beside["x-request-id"])
    assert not [line for line in server.lines[before:] if line["level"] == "error"]


def test_every_refusal_has_its_status():
    assert STATUSES.keys() >= STATUS.keys()
    assert all(grpc.StatusCode[name] for name in STATUSES.values())


@pytest.mark.slow
def test_a_grpc_port_that_is_taken_ends_the_server(server):
    command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--port=0", f"--grpc-port={port_of(server)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr


def test_without_its_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert serve.main(["--grpc-port=0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip install '.[grpc]'" in printed.err
