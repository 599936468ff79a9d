"""Calls through a gRPC channel with messages built from the .proto file, also some that no client can send."""

import contextlib
import threading

import grpc

from flashpoint_server.oip.grpc import protos
from tests.support.oip.message import NAMES, raw

SERVICE = "inference.GRPCInferenceService"
METHOD = f"/{SERVICE}/ModelInfer"
HEALTH = "grpc.health.v1.Health"
TYPED = {"BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents",
         "FP64": "fp64_contents"}  # fmt: skip
Request, Response = protos.message("inference.ModelInferRequest"), protos.message("inference.ModelInferResponse")
HANG = 600  # seconds; only a hang takes so long
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def say(parameters, values):
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in values.items():
        setattr(parameters[name], kinds[type(value)], value)


def request(
    tensors, *, model="attention", typed=False, outputs=(), inputs=None, wanted=None, version="", id="", **options
):
    """Return a request. With `typed`, tensors are lists of numbers, else raw bytes.

    `inputs` and `wanted` map the names of input and output tensors to their parameters.
    """
    message = Request(model_name=model, model_version=version, id=id)
    say(message.parameters, options)
    for name, t in tensors.items():
        entry = message.inputs.add(name=name, datatype=NAMES[t.dtype], shape=t.shape)
        if inputs and name in inputs:
            say(entry.parameters, inputs[name])
        elif typed:
            entry.contents.SetInParent()
            getattr(entry.contents, TYPED[NAMES[t.dtype]]).extend(t.flatten().tolist())
        else:
            message.raw_input_contents.append(raw(t))
    for name in outputs:
        say(message.outputs.add(name=name).parameters, (wanted or {}).get(name, {}))
    return message


class Answer:
    """A response message, and its trailing metadata in `beside`."""

    def __init__(self, message, call):
        self.message = message
        self.beside = dict(call.trailing_metadata())

    @property
    def bits(self):
        """Return the bytes of each output."""
        names = [output.name for output in self.message.outputs]
        return dict(zip(names, self.message.raw_output_contents, strict=True))

    @property
    def numbers(self):
        """Return the numbers of each output of an answer without raw bytes."""
        assert not self.message.raw_output_contents
        results = {}
        for output in self.message.outputs:
            ((_, numbers),) = output.contents.ListFields()
            results[output.name] = list(numbers)
        return results


class Caller:
    def __init__(self, port):
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=NO_LIMIT)

    def close(self):
        self.channel.close()

    def method(self, name, service=SERVICE):
        return self.channel.unary_unary(f"/{service}/{name}")

    def infer(self, message, **how):
        """Call and return the answer; `message` may be bytes. Raises grpc.RpcError."""
        sent = message if isinstance(message, bytes) else message.SerializeToString()
        answer, call = self.method("ModelInfer").with_call(sent, **{"timeout": HANG, **how})
        return Answer(Response.FromString(answer), call)

    def begin(self, message, **how):
        """Start `infer` in the background without a deadline; return the call, with `result` and `cancel`."""
        return self.method("ModelInfer").future(message.SerializeToString(), **how)

    def ask(self, name, service=SERVICE, /, **fields):
        """Call any other method with a request that has `fields`, and return its response."""
        request_type, answer_type = protos.methods(service)[name]
        return answer_type.FromString(
            self.method(name, service)(request_type(**fields).SerializeToString(), timeout=HANG)
        )


@contextlib.contextmanager
def refused(status, *words):
    """Check that the call in the block fails with this status and these words."""
    results = []
    try:
        yield results
    except grpc.RpcError as error:
        results.append(error)
    assert results, f"no {status}"
    (error,) = results
    assert error.code() is grpc.StatusCode[status], (error.code(), error.details())
    for word in words:
        assert word in error.details()


def port_of(server):
    return server.wait_for_line(lambda line: line["event"] == "listening for gRPC")["port"]


@contextlib.contextmanager
def silent_call(caller, metadata=(), method=METHOD):
    """Start a call without a deadline that sends no message until the block ends; yield its future."""
    never = threading.Event()

    def messages():
        never.wait(HANG)
        yield from ()

    try:
        yield caller.channel.stream_unary(method).future(messages(), metadata=metadata)
    finally:
        never.set()
