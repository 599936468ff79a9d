"""ModelInfer gives the same bits as HTTP and shares its queue. Calls may be refused before their messages are read."""

import contextlib
import re
import secrets
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import grpc
import torch

from flashpoint_kernels import native
from flashpoint_server.access.admission import FEW
from tests.support.oip.grpc_calls import HANG, HEALTH, METHOD, port_of, refused, request, silent_call
from tests.support.oip.held import ALL, LOOKS
from tests.support.oip.message import infer, raw
from tests.support.oip.problem import GRAD, problem
from tests.support.servers import wait_for

ROOT = Path(__file__).parents[4]


SMALL = problem()


def test_the_example_of_the_page(server):
    page = (ROOT / "docs" / "oip.md").read_text().partition("Over gRPC:")[2]
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    code = code.replace("localhost:8001", f"localhost:{port_of(server)}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


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
        del inputs["k"]  # k is in the message
        alone = caller.infer(request(SMALL, inputs=inputs, outputs=["o"], wanted={"o": places[3]}))
        assert not alone.message.raw_output_contents
        caller.ask("SystemSharedMemoryUnregister", name="mine")
        with refused("INVALID_ARGUMENT", "mine"):
            caller.infer(request(SMALL, inputs=inputs))
        with refused("NOT_FOUND", "mine"):
            caller.ask("SystemSharedMemoryStatus", name="mine")
        caller.ask("SystemSharedMemoryUnregister", name="mine")  # a second unregistration has no effect
        with refused("INVALID_ARGUMENT", "name"):
            caller.ask("SystemSharedMemoryRegister", name="a/b", key=f"/{key}", byte_size=1)
    finally:
        caller.ask("SystemSharedMemoryUnregister")
        block.close()
        block.unlink()


LIMIT = 8  # requests that `held` admits


def batch_size(call):
    return dict(call.trailing_metadata())["x-batch-size"]


@pytest.mark.slow
def test_a_cancelled_call_and_a_late_one_are_not_in_the_batch_and_the_others_are(held):
    expected = held.queue("alone").result(HANG)
    held.wait_inside(0)
    before = held.metrics()
    with held.busy() as first:
        # With the gated and the late call, these are FEW requests, admitted whatever their predicted wait is.
        mates = [held.queue("stays") for _ in range(FEW - 2)]
        leaver = held.queue("leaves")
        leaver.cancel()
        held.wait_dropped(leaver.name)
        held.wait_inside(FEW - 1)
        late = held.overdue()
    assert first.result(HANG)
    assert [mate.result(HANG) for mate in mates] == [expected] * len(mates)
    assert {batch_size(mate) for mate in mates} == {str(len(mates))}
    assert not held.begun(leaver.name)
    assert not held.begun(late.name)
    after = held.metrics()

    def grown(name):
        return after[name] - before.get(name, 0)

    answered = 1 + len(mates)
    overdue = grown("flashpoint_accepted_total") - answered - 1
    assert overdue >= 1
    assert grown('flashpoint_ended_total{how="answered"}') == answered
    assert grown('flashpoint_ended_total{how="cancelled"}') == 1
    assert grown('flashpoint_ended_total{how="refused"}') == overdue
    assert grown(f'flashpoint_requests_total{{reason="client_gone",route="{METHOD}",status="499"}}') == 1
    assert grown(f'flashpoint_requests_total{{reason="deadline_exceeded",route="{METHOD}",status="504"}}') >= overdue
    assert grown('flashpoint_model_requests_total{how="fail",model="attention"}') >= 1 + overdue


def test_a_call_that_is_cancelled_in_a_running_batch_does_not_change_the_others(held):
    expected = held.queue("alone").result(HANG)
    with contextlib.ExitStack() as first:
        first.enter_context(held.busy())
        with held.busy("wait") as shared:
            mates = [held.queue("stays") for _ in range(2)]
            leaver = held.queue("leaves")
            first.close()
            held.wait_begun(leaver.name)
            leaver.cancel()
            held.wait_inside(3)
    calls = (shared, *mates)
    assert [call.result(HANG) for call in calls] == [expected] * 3
    assert {batch_size(call) for call in calls} == {"4"}


def test_a_full_queue_refuses_a_call_before_its_message_is_read_and_answers_health_checks(held):
    with held.busy():
        queued = [held.queue("waits") for _ in range(LIMIT - 1)]
        with unsent_message(held, ALL) as call:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(call.trailing_metadata())["retry-after"] == "1"
        assert held.caller.ask("Check", HEALTH).status == 1  # SERVING
    assert len({call.result(HANG) for call in queued}) == 1


def test_answers_count_as_memory_and_go_with_their_calls(held):
    """An answer of 16 MiB counts twice, and a key may use half of 62 MiB: nothing else may then have memory."""
    shapes = {"q": (1, 1, 1 << 14, 1), "k": (1, 1, 1, 1), "v": (1, 1, 1, 256)}
    large = request({name: torch.ones(shape) for name, shape in shapes.items()}, backend="reference")
    with held.busy(), refused("RESOURCE_EXHAUSTED", "gRPC holds", "needs 33554432 more"):
        call = held.caller.begin(large, metadata=ALL)
        wait_for(lambda: call.done() or held.inside() == 2, lambda: "the call neither ends nor waits")
        call.result(0)
    for _ in range(3):
        held.wait_inside(0)
        assert len(held.caller.infer(large, metadata=ALL).bits["o"]) == 1 << 24


def test_the_memory_of_one_key_leaves_that_of_another_alone(held):
    """Answers of 24 MiB in memory for each of two keys exceed the half of one, and not the whole."""
    shapes = {"q": (1, 1, 3 << 12, 1), "k": (1, 1, 1, 1), "v": (1, 1, 1, 256)}
    large = request({name: torch.ones(shape) for name, shape in shapes.items()}, backend="reference")
    with held.shut() as name:
        first = held.caller.begin(large, metadata=(*ALL, ("x-request-id", name)))
        held.wait_begun(name)
        with refused("RESOURCE_EXHAUSTED", "gRPC holds"):
            held.caller.infer(large, metadata=ALL)
        other = held.caller.begin(large, metadata=(("authorization", "Bearer asks"), ("x-request-id", f"after-{name}")))
        wait_for(lambda: other.done() or held.inside() == 2, lambda: "the other key's call does not arrive")
    assert first.result(HANG)
    assert other.result(HANG)


@pytest.mark.slow
def test_a_call_without_a_key_or_its_right_is_refused_before_its_message_is_read(held):
    for metadata, status, words in (((), "UNAUTHENTICATED", "no valid API key"), (LOOKS, "PERMISSION_DENIED", "key")):
        with unsent_message(held, metadata) as call:
            assert call.code() is grpc.StatusCode[status]
            assert words in call.details()
    with refused("UNAUTHENTICATED"):
        held.caller.ask("ServerMetadata")
    assert held.caller.method("ServerMetadata")(b"", metadata=LOOKS, timeout=HANG)
    with refused("PERMISSION_DENIED"):
        held.caller.method("ModelStatistics")(b"", metadata=LOOKS, timeout=HANG)


@contextlib.contextmanager
def unsent_message(held, metadata):
    """Start a call that sends no message, and yield it after the server has ended it."""
    with silent_call(held.caller, metadata) as call:
        assert call.exception(HANG) is not None
        yield call
