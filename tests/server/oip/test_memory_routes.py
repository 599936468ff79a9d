"""Callers on this host register shared memory; the server reads inputs from it and writes outputs into it."""

import contextlib
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from pydantic import ValidationError

from flashpoint_server import Settings
from tests.support.oip.held import ALL
from tests.support.oip.message import LENGTH, NAMES, call, entry, infer, raw, wanted
from tests.support.oip.problem import GRAD, B, D, H, S, near, problem, truth
from tests.support.servers import wait_for

KEY = dict(ALL)


@contextlib.contextmanager
def running(held):
    """Start a request with tensors in shared memory, which the engine begins to compute when the `with` block ends.

    The block can let the engine compute it earlier, by creating the file `held.gate("gate")`. Yield the shared memory,
    its key, the path of its region's routes, the future of the answer, and the expected output.
    """
    tensors = problem()
    nbytes = len(raw(tensors["q"]))
    with held.shut() as name, ThreadPoolExecutor(1) as pool:
        key = f"flashpoint-test-{name}"
        block = shared_memory.SharedMemory(key, create=True, size=4 * nbytes)
        try:
            block.buf[: 3 * nbytes] = b"".join(raw(t) for t in tensors.values())
            region = json.dumps({"key": f"/{key}", "offset": 0, "byte_size": 4 * nbytes}).encode()
            path = f"/v2/systemsharedmemory/region/{name}"
            assert call(held.server.url, "POST", f"{path}/register", region, **KEY).status == 200
            places = [
                {"shared_memory_region": name, "shared_memory_byte_size": nbytes, "shared_memory_offset": i * nbytes}
                for i in range(4)
            ]
            document = {
                "inputs": [
                    {**entry(n, t), "parameters": p} for (n, t), p in zip(tensors.items(), places, strict=False)
                ],
                "outputs": [{"name": "o", "parameters": places[3]}],
                "parameters": {"backend": "reference"},
            }
            future = pool.submit(
                call, held.server.url, "POST", "/v2/models/attention/infer", json.dumps(document).encode(),
                **KEY, x_request_id=name,
            )  # fmt: skip
            held.wait_begun(name)
            yield block, key, path, future, truth(tensors)["o"]
        finally:
            held.gate("gate").touch()
            future.result()
            call(held.server.url, "POST", "/v2/systemsharedmemory/unregister", b"", **KEY)
            block.close()
            block.unlink()


def test_a_request_that_runs_keeps_its_region(held):
    """If a region is unregistered during a request, the output is still written to it. Then the engine unmaps it."""
    with running(held) as (block, key, path, future, expected):
        assert call(held.server.url, "POST", f"{path}/unregister", b"", **KEY).status == 200
        assert not future.done()
        held.gate("gate").touch()
        assert future.result().status == 200
        actual = torch.frombuffer(bytearray(block.buf[len(block.buf) // 4 * 3 :]), dtype=torch.float32)
        near(actual[: expected.numel()].view(expected.shape), expected, 2e-6)
        maps = Path(f"/proc/{held.server.engine_pid}/maps")
        wait_for(lambda: key not in maps.read_text(), lambda: "still mapped")


@pytest.mark.slow
def test_a_client_that_truncates_its_region_costs_an_engine_and_no_more(held):
    """If a client truncates the memory of its region, the engine dies, and a new engine serves the next requests."""
    before = held.server.engine_pid
    with running(held) as (_, key, _, future, _):
        os.truncate(f"/dev/shm/{key}", 0)
        held.gate("gate").touch()
        assert future.result().status == 503
    held.server.wait_ready()
    assert held.server.engine_pid != before
    assert infer(held.server.url, "attention", problem(), headers=KEY).status == 200


MIB = 1 << 20


NBYTES = B * H * S * D * 4


@pytest.fixture(scope="module")
def server(rpc_server):
    return rpc_server


@pytest.fixture
def memory(server):
    """Yield (shared memory object of 64 KiB, its key). Check that the key is not in the log."""
    key = "flashpoint-test-" + secrets.token_hex(8)
    block = shared_memory.SharedMemory(key, create=True, size=1 << 16)
    try:
        yield block, key
    finally:
        call(server.url, "POST", "/v2/systemsharedmemory/unregister", b"")
        with contextlib.suppress(BufferError):
            block.close()
        block.unlink()
    assert not [line for line in server.lines if key in json.dumps(line)]


def register(server, name, key, offset=0, byte_size=1 << 16):
    body = json.dumps({"key": "/" + key, "offset": offset, "byte_size": byte_size}).encode()
    return call(server.url, "POST", f"/v2/systemsharedmemory/region/{name}/register", body)


def lying(name, t, region, offset):
    """Return the JSON of an input whose data is in a shared-memory region, at this offset."""
    place = {"shared_memory_region": region, "shared_memory_byte_size": t.numel() * t.element_size()}
    return {"name": name, "shape": list(t.shape), "datatype": NAMES[t.dtype],
            "parameters": {**place, "shared_memory_offset": offset}}  # fmt: skip


def place(region, size, offset=0):
    return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def ask(server, inputs, outputs=None, parameters=None, data=b"", model="attention", headers=None):
    document = {"inputs": inputs, "parameters": parameters or {}, **({"outputs": outputs} if outputs else {})}
    head = json.dumps(document).encode()
    headers = {**(headers or {}), **({LENGTH: len(head)} if data else {})}
    return call(server.url, "POST", f"/v2/models/{model}/infer", head + data, **headers)


@pytest.mark.parametrize("start", [0, 3, 4, 64])
def test_inputs_and_outputs_of_several_regions_and_of_the_body(server, memory, start):
    """q and k are in two regions, v is in the body, o goes into a region, and lse into the JSON answer."""
    block, key = memory
    tensors = problem()
    assert register(server, "low", key, 0, 1 << 15).status == 200
    assert register(server, "high", key, 1 << 15, 1 << 15).status == 200
    block.buf[start : start + NBYTES] = raw(tensors["q"])
    block.buf[(1 << 15) + start : (1 << 15) + start + NBYTES] = raw(tensors["k"])
    inputs = [lying("q", tensors["q"], "low", start), lying("k", tensors["k"], "high", start)]
    v = {"name": "v", "shape": [B, H, S, D], "datatype": "FP32", "parameters": {"binary_data_size": NBYTES}}
    at = 3 * NBYTES
    outputs = [wanted("lse"), wanted("o", **place("low", NBYTES, at))]
    reply = ask(server, [*inputs, v], outputs, {"causal": True}, raw(tensors["v"]))
    assert reply.status == 200, reply.body
    lse, o = reply.head["outputs"]
    assert o["parameters"] == place("low", NBYTES, at)
    assert "data" not in o
    expected = truth(tensors, causal=True)
    near(
        torch.frombuffer(bytearray(block.buf[at : at + NBYTES]), dtype=torch.float32).view(B, H, S, D),
        expected["o"],
        2e-6,
    )
    near(torch.tensor(lse["data"]).view(lse["shape"]), expected["lse"], 2e-6)
    plain = infer(server.url, "attention", tensors, parameters={"causal": True, "binary_data_output": True})
    assert raw(plain.tensors["o"]) == bytes(block.buf[at : at + NBYTES])
    assert bytes(block.buf[at + NBYTES : 1 << 15]) == bytes((1 << 15) - at - NBYTES)


def test_gradients_and_index_tensors(server, memory):
    block, key = memory
    assert register(server, "all", key).status == 200
    tensors = {**problem(names=GRAD), "kv_lengths": torch.tensor([S - 5], dtype=torch.int32)}
    at, inputs = 0, []
    for name, t in tensors.items():
        block.buf[at : at + len(raw(t))] = raw(t)
        inputs.append(lying(name, t, "all", at))
        at += len(raw(t))
    outputs = [wanted(name, **place("all", NBYTES, (5 + i) * NBYTES)) for i, name in enumerate(("dq", "dk", "dv"))]
    assert ask(server, inputs, outputs, model="attention_grad").status == 200
    plain = infer(server.url, "attention_grad", tensors, parameters={"binary_data_output": True})
    for i, t in enumerate(plain.tensors.values()):
        assert raw(t) == bytes(block.buf[(5 + i) * NBYTES : (6 + i) * NBYTES])


def test_a_region_may_go_while_it_is_used_and_come_again(server, memory):
    block, key = memory
    tensors = problem()
    for name, t in tensors.items():
        block.buf["qkv".index(name) * NBYTES :][:NBYTES] = raw(t)
    inputs = [lying(name, t, "again", "qkv".index(name) * NBYTES) for name, t in tensors.items()]
    output = [wanted("o", **place("again", NBYTES, 4 * NBYTES))]
    for _ in range(3):
        assert register(server, "again", key).status == 200
        block.buf[4 * NBYTES :][:NBYTES] = bytes(NBYTES)
        assert ask(server, inputs, output).status == 200
        actual = torch.frombuffer(bytearray(block.buf[4 * NBYTES : 5 * NBYTES]), dtype=torch.float32)
        near(actual.view(B, H, S, D), truth(tensors)["o"], 2e-6)
        assert call(server.url, "POST", "/v2/systemsharedmemory/region/again/unregister", b"").status == 200
        refused = ask(server, inputs, output)
        assert refused.status == 422
        assert "region 'again' is not registered" in refused.error
    wait_for(lambda: key not in Path(f"/proc/{server.engine_pid}/maps").read_text(), lambda: "still mapped")


WRONG = {
    "another region": ({"shared_memory_region": "none"}, "none"),
    "beyond the region": ({"shared_memory_offset": (1 << 16) - 8}, "exceed the region's"),
    "a negative offset": ({"shared_memory_offset": -64}, "shared_memory_offset"),
    "an offset that overflows": ({"shared_memory_offset": (1 << 63) - 1}, "exceed the region's"),
    "too few bytes": ({"shared_memory_byte_size": 8}, f"at least {NBYTES} bytes for this shape"),
    "no size": ({"shared_memory_byte_size": None}, "shared_memory_byte_size"),
    "no region": ({"shared_memory_region": None}, "shared_memory_region"),
    "over an input": ({"shared_memory_offset": NBYTES}, "overlaps"),
    "not aligned": ({"shared_memory_offset": 4 * NBYTES + 2}, "multiple of 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_place_that_is_wrong_is_refused(server, memory, name):
    _, key = memory
    assert register(server, "all", key).status == 200
    tensors = problem()
    inputs = [lying(n, t, "all", i * NBYTES) for i, (n, t) in enumerate(tensors.items())]
    changes, message = WRONG[name]
    parameters = {k: v for k, v in {**place("all", NBYTES, 4 * NBYTES), **changes}.items() if v is not None}
    reply = ask(server, inputs, [wanted("o", **parameters)])
    assert reply.status == 422, reply.body
    assert message in reply.error
    assert ask(server, inputs, [wanted("o", **place("all", NBYTES, 4 * NBYTES))]).status == 200


@pytest.mark.parametrize("size", [NBYTES - 4, NBYTES + 4])
def test_an_inputs_place_has_its_size(server, memory, size):
    """shared_memory_byte_size of an input must be its exact size; that of an output may be larger, as in Triton."""
    _, key = memory
    assert register(server, "all", key).status == 200
    inputs = [lying(n, t, "all", i * NBYTES) for i, (n, t) in enumerate(problem().items())]
    inputs[1]["parameters"]["shared_memory_byte_size"] = size
    reply = ask(server, inputs)
    assert reply.status == 422
    assert f"k: shared_memory_byte_size must be {NBYTES} bytes" in reply.error
    assert f"not {size}" in reply.error
    inputs[1]["parameters"]["shared_memory_byte_size"] = NBYTES
    assert ask(server, inputs, [wanted("o", **place("all", NBYTES + 64, 4 * NBYTES))]).status == 200


def test_an_object_that_became_shorter_is_seen(server, memory):
    _, key = memory
    assert register(server, "short", key).status == 200
    os.truncate(f"/dev/shm/{key}", 4096)
    reply = ask(server, [lying(n, t, "short", 0) for n, t in problem().items()])
    assert reply.status == 422
    assert "has become shorter" in reply.error
    assert infer(server.url, "attention", problem()).status == 200


def test_what_may_not_be_registered(server, memory):
    _, key = memory
    for other in ("nothing-has-this", "../../etc/passwd", "", ".", "..", "a" * 300, "a\0b"):
        reply = register(server, "bad", other)
        assert reply.status == 422, (other, reply.body)
        assert not other or other == "." or other not in reply.error
    assert register(server, "bad", key, 0, (1 << 16) + 1).status == 422
    assert register(server, "bad", key, 1 << 16, 1).status == 422
    assert register(server, "bad", key, -1, 1).status == 422
    assert register(server, "bad", key, 0, 0).status == 422
    assert register(server, "bad", key, 0, 2 * MIB).status == 413
    assert register(server, "bad", key, 0, "1").status == 422
    link = Path("/dev/shm") / (key + "-link")
    link.symlink_to("/etc/hostname")
    try:
        assert register(server, "bad", link.name, 0, 1).status == 422
    finally:
        link.unlink()
    assert register(server, "good", key).status == 200
    assert register(server, "good", key).status == 422  # the name is taken
    path = "/v2/systemsharedmemory/region/good/register"
    assert call(server.url, "POST", path, b"{").status == 400
    assert call(server.url, "POST", path, b'{"key": "' + b"x" * 5000 + b'"}').status == 413
    listed = call(server.url, "GET", "/v2/systemsharedmemory/status").head
    assert listed == [{"name": "good", "key": "", "offset": 0, "byte_size": 1 << 16}]
    assert call(server.url, "GET", "/v2/systemsharedmemory/region/good/status").head == listed
    assert call(server.url, "GET", "/v2/systemsharedmemory/region/bad/status").status == 404
    assert call(server.url, "POST", "/v2/systemsharedmemory/region/bad/unregister", b"").head == {}  # no effect


def test_what_is_registered_is_bounded(server, memory):
    _, key = memory
    size = 1 << 16
    names = [f"region-{i}" for i in range(MIB // size)]
    assert {register(server, name, key).status for name in names} == {200}
    assert register(server, "one-more", key, 0, 1).status == 413
    assert call(server.url, "POST", f"/v2/systemsharedmemory/region/{names[0]}/unregister", b"").status == 200
    assert register(server, "one-more", key, 0, 1).status == 200
    assert call(server.url, "POST", "/v2/systemsharedmemory/unregister", b"").status == 200
    assert call(server.url, "GET", "/v2/systemsharedmemory/status").head == []
    assert [register(server, f"tiny-{i}", key, 0, 1).status for i in range(257)] == [200] * 256 + [413]


def test_it_needs_one_http_process():
    with pytest.raises(ValidationError, match="needs one worker"):
        Settings(workers=2, shared_memory_bytes=1)
