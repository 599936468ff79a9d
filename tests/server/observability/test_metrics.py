"""A real server's metrics show readiness, queued work and clients that leave."""

import concurrent.futures
import contextlib
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import psutil

from flashpoint_kernels.native import switches
from flashpoint_server.ipc.messages import AnswerVerified, Done, Holding
from flashpoint_server.observability.metrics import Metrics
from tests.support.messages import JSON, PATIENCE, message, normal, post, read_metrics
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside, send

SMALL = message({name: normal(2, 3) for name in "qkv"})


ALONE = message({name: normal(2, 3) for name in "qkv"}, backend="reference")


LAUNCHES = "flashpoint_batch_size_count"


# The answer to this request has 16 MiB, more than socket buffers hold.
LONG_ANSWER = message({"q": normal(1, 4, 1 << 12, 1), "k": normal(1, 4, 1, 1), "v": normal(1, 4, 1, 256)})


OLDEST = "flashpoint_queue_oldest_seconds"


AS_JSON = json.dumps({"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}).encode()


def test_kernels_that_are_off_are_shown_with_the_reason():
    metrics = Metrics()
    metrics.kernels_off("0", {"avx512": switches.SETTING, "tiled": "the check at the engine's start: it is wrong"})
    (off,) = (metric for metric in metrics.registry.collect() if metric.name == "flashpoint_kernels_off")
    shown = {(sample.labels["kernel"], sample.labels["by"]): sample.value for sample in off.samples}
    assert shown == {("avx512", "setting"): 1, ("tiled", "check"): 1}


def test_verified_answers_are_counted_by_what_they_were():
    metrics = Metrics()
    metrics.verified(AnswerVerified("cpu", "bfloat16", "backward", "right"))
    (counted,) = (metric for metric in metrics.registry.collect() if metric.name == "flashpoint_verified")
    labels = next(sample.labels for sample in counted.samples if sample.name == "flashpoint_verified_total")
    assert labels == {"backend": "cpu", "dtype": "bfloat16", "direction": "backward", "result": "right"}


def test_ready_is_what_the_health_check_says(server):
    server.wait_ready()
    assert read_metrics(server)["flashpoint_ready"] == 1
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready, with an engine that does nothing")
        assert read_metrics(server)["flashpoint_ready"] == 0
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    server.wait_ready()
    assert read_metrics(server)["flashpoint_ready"] == 1


def test_a_body_that_comes_slowly_and_an_answer_that_is_taken_slowly_are_not_queued_work(server, gated):
    """The age of the oldest queued request counts only time that it waits for the engine, not for its client.

    `server` allows long pauses in a body and an answer; `gated` has an engine that waits.
    """
    nothing_inside(server)
    with send(server, SMALL[:-8], length=len(SMALL)):
        wait_for(lambda: server.get("/info")[1]["load"]["requests"] == 1, lambda: "it never got in")
        assert read_metrics(server)["flashpoint_queue_requests"] == 1
        assert read_metrics(server)[OLDEST] == 0
    nothing_inside(server)
    launches = read_metrics(server)[LAUNCHES]
    with send(server, LONG_ANSWER, receive_buffer=1 << 16):
        wait_for(lambda: read_metrics(server)[LAUNCHES] > launches, lambda: "it is not computed")
        assert read_metrics(server)[OLDEST] == 0
    nothing_inside(server)
    server = gated.server
    with concurrent.futures.ThreadPoolExecutor(1) as pool, gated.busy(pool, ALONE):
        first = read_metrics(server)[OLDEST]
        assert first > 0
        wait_for(lambda: read_metrics(server)[OLDEST] > first, lambda: "it does not age")
    nothing_inside(server)
    assert read_metrics(server)[OLDEST] == 0


def test_json_that_waits_to_be_read_is_queued_work(server):
    assert post(server, "/attention", AS_JSON, JSON).status == 200
    codec = server.json_pid
    os.kill(codec, signal.SIGSTOP)
    try:
        with asking(server, AS_JSON, f"queued-{os.urandom(4).hex()}"):
            wait_for(lambda: read_metrics(server)[OLDEST] > 0, lambda: "it does not age")
    finally:
        os.kill(codec, signal.SIGCONT)
    nothing_inside(server)


@contextlib.contextmanager
def asking(server, body, name):
    """Send a JSON request at the start of the block, and close its connection at the end, without reading."""
    head = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\nContent-Type: {JSON}\r\n"
    with connect(server) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


def peers(server):
    """Return the ports of the clients whose connections the server has open."""
    return {
        connection.raddr.port for connection in psutil.Process(server.pid).net_connections("tcp") if connection.raddr
    }


def client_gone(server):
    labels = 'reason="client_gone",route="/attention",status="499"'
    return read_metrics(server).get(f"flashpoint_requests_total{{{labels}}}", 0)


def test_a_client_that_vanishes_while_its_answer_is_written_is_499(server):
    """If a client leaves while its answer is encoded as JSON, its log line and the metric have status 499."""
    assert post(server, "/attention", SMALL, accept=JSON).status == 200
    codec = server.json_pid
    nothing_inside(server)
    before, name = client_gone(server), f"vanishes-{os.urandom(4).hex()}"
    computed = 'flashpoint_compute_flops_total{backend="cpu"}'
    flops = read_metrics(server)[computed]
    os.kill(codec, signal.SIGSTOP)
    try:
        with send(server, SMALL, request_id=name, accept=JSON) as connection:
            port = connection.getsockname()[1]
            wait_for(lambda: read_metrics(server)[computed] > flops, lambda: "it is not computed")
        wait_for(lambda: port not in peers(server), lambda: "the server does not notice")
    finally:
        os.kill(codec, signal.SIGCONT)
    line = server.wait_for_request(name)
    assert (line["status"], line["code"]) == (499, "client_gone")
    wait_for(lambda: client_gone(server) == before + 1, lambda: read_metrics(server))


@pytest.mark.parametrize(("name", "below"), [("PROMETHEUS_MULTIPROC_DIR", ""), ("prometheus_multiproc_dir", "missing")])
def test_a_folder_for_metrics_in_the_environment_of_another_program_has_no_effect(start_server, tmp_path, name, below):
    """prometheus_client would add what other processes have counted there, and fail in a folder that is missing."""
    server = start_server(environment={name: str(tmp_path / below)})
    for _ in range(3):
        assert post(server, "/attention", SMALL).status == 200
    wait_for(lambda: read_metrics(server).get('flashpoint_ended_total{how="answered"}') == 3, lambda: "not counted")
    assert read_metrics(server)["flashpoint_ready"] == 1
    assert not list(tmp_path.iterdir())


def test_the_lag_of_the_event_loop_is_measured(server):
    """A server that is stopped for a while is late by that time."""
    before = read_metrics(server)["flashpoint_loop_lag_seconds_sum"]
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.4)
    os.kill(server.pid, signal.SIGCONT)
    wait_for(lambda: read_metrics(server)["flashpoint_loop_lag_seconds_sum"] - before > 0.25, lambda: "no lag")


ENGINE = SimpleNamespace(process=("engine-0", 7))


def test_a_launch_is_counted_with_its_seconds_without_copies():
    metrics = Metrics()
    done = Done(
        1,
        {"backend": "cpu"},
        10.0,
        12.0,
        3,
        copy_in=0.25,
        copy_out=0.5,
        memory=77,
        launch=1,
        dropped=4,
        flops=1000,
        padding=10,
        fill=0.5,
        splits=2,
    )
    metrics.computed(ENGINE, done)
    of = {"backend": "cpu"}
    for name, labels, value in (
        ("compute_seconds_total", of, 1.25), ("compute_flops_total", of, 1000), ("kernel_tflops", {}, 8e-10),
        ("batch_size_sum", {}, 3), ("batch_fill_sum", {}, 0.5), ("padding_saved_flops_total", {}, 10),
        ("out_of_memory_splits_total", {}, 2), ("device_memory_bytes", {}, 77),
        ("log_lines_dropped_total", {"process": "engine-0"}, 4),
    ):  # fmt: skip
        assert metrics.registry.get_sample_value(f"flashpoint_{name}", labels) == pytest.approx(value), name


def test_what_an_engine_held_is_shown_until_it_is_lost():
    metrics, names = Metrics(), ("caches", "cache_bytes", "saved_forwards", "saved_bytes")

    def shown():
        return [metrics.registry.get_sample_value(f"flashpoint_{name}", {"engine": "engine-0"}) for name in names]

    metrics.holding_changed(ENGINE, Holding(1, 20, 3, 40))
    assert shown() == [1, 20, 3, 40]
    metrics.lost(ENGINE)
    assert shown() == [0, 0, 0, 0]
    assert metrics.registry.get_sample_value("flashpoint_engine_restarts_total") == 1
