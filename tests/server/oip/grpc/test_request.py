"""The error about an invalid gRPC request names the wrong field. KServe's extra parameters are accepted."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.oip.grpc_calls import refused, request
from tests.support.oip.message import raw
from tests.support.oip.problem import problem

MIB = 1 << 20


SMALL = problem()


SIZE = len(raw(SMALL["q"]))


def test_what_clients_say_of_bytes_is_taken(caller):
    """The server accepts parameters of KServe's client: the size of an input, and bytes or numbers for an output."""
    expected = caller.infer(request(SMALL)).bits
    message = sized(SIZE)
    message.outputs.add(name="o").parameters["binary_data"].bool_param = True
    assert caller.infer(message).bits == expected
    numbers = caller.infer(request(SMALL, outputs=["o"], wanted={"o": {"binary_data": False}})).numbers["o"]
    assert raw(torch.tensor(numbers)) == expected["o"]


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
        assert {"x-request-id"} <= dict(error[0].trailing_metadata()).keys() <= {"x-request-id", "retry-after"}
    assert caller.infer(request(SMALL, causal=True)).bits  # the server continues to serve
