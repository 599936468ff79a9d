"""What Kubernetes asks of a pod, asked of real servers: the probes, and a rolling update in which no call is lost.

In the update a balancer of connections has a Service's place: the new pod is ready, the old one leaves the Service, and
gets SIGTERM.
"""

import asyncio
import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import yaml

import flashpoint
from tests.support.messages import message, normal, post
from tests.support.servers import wait_for

CALLERS = 3
SMALL = message({name: normal(1, 1, 2, 4, seed=seed) for seed, name in enumerate("qkv")})
LONG_TENSORS = {name: normal(1, 3, 2000, 2, seed=seed) for seed, name in enumerate(["q", "k", "v", "do"])}
LONG = message(LONG_TENSORS, backend="reference")  # seconds of float64


class Service:
    """Connections go to `target`; those that are open stay where they are, as with kube-proxy."""

    def __init__(self, target):
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _do(self, coroutine):
        async def done():
            return await coroutine

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result()

    async def _connect(self, reader, writer):
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
            await asyncio.gather(self._carry(reader, server_writer), self._carry(server_reader, writer))
        finally:
            writer.close()

    async def _carry(self, reader, writer):
        try:
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:  # ended from outside, too: what is left open is found by whichever test runs next
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def close(self):
        async def end():
            self._server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def service_to():
    with contextlib.ExitStack() as services:
        yield lambda target: services.enter_context(contextlib.closing(Service(target)))


@pytest.fixture(scope="module")
def new(start_server):
    """The pod that stays; perhaps not ready yet."""
    return start_server(ready=False)


def test_no_call_is_lost_when_a_pod_is_replaced(start_server, new, service_to):
    old = start_server(log_level="debug", shutdown_timeout=300)  # as long as a busy machine may take
    service = service_to(old.port)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 16, 32), np.float32) for _ in "qkv")
    answers = [[] for _ in range(CALLERS)]
    over = threading.Event()

    def call(given):
        with flashpoint.Client(service.url) as client:
            while not over.is_set():
                given.append(client.attention(q, k, v, causal=True))

    with ThreadPoolExecutor() as pool:
        calling = [pool.submit(call, given) for given in answers]
        try:
            wait_for(lambda: all(answers), lambda: "nobody was answered")
            new.wait_ready()
            long = pool.submit(post, service, "/attention/grad", LONG, x_request_id="long")
            old.wait_for_line(lambda line: line["event"] == "begin" and line["request_id"] == "long")
            service.target = new.port
            old.process.send_signal(signal.SIGTERM)
            old.wait_for_line(lambda line: line["event"] == "draining")
            # Who keeps a connection is sent elsewhere, and so does not come back on it until no retry is left.
            refused = post(old, "/attention", SMALL)
            assert (refused.status, refused.json["code"]) == (503, "draining")
            assert refused.headers["connection"] == "close"
            assert long.result().status == 200
            assert old.wait_exit() == 0
            counts = [len(given) for given in answers]
            wait_for(
                lambda: all(len(given) > count for given, count in zip(answers, counts, strict=True)),
                lambda: "a caller was left behind",
            )
        finally:
            over.set()
        for caller in calling:
            caller.result()
    assert any(line["event"] == "request" and line["route"] == "/attention" for line in new.lines)
    first = answers[0][0]
    assert all(np.array_equal(answer, first) for given in answers for answer in given)


def test_probes_and_prometheus_ask_what_the_server_answers(new):
    charts = pytest.importorskip("tests.support.charts", reason="helm-python-sdk has no build for this platform")
    new.wait_ready()
    rendered = charts.render(charts.EXAMPLES["everything"])
    (chart,) = [m["spec"]["template"]["spec"]["containers"][0] for m in rendered if m["kind"] == "Deployment"]
    kserve = yaml.safe_load((charts.DEPLOY / "kserve/inferenceservice.yaml").read_text())["spec"]["predictor"]
    for container in (chart, *kserve["containers"]):
        paths = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")]
        assert [path.rpartition("/")[2] for path in paths] == ["ready", "ready", "live"]
        assert [new.get(path)[0] for path in paths] == [200, 200, 200]
    (monitor,) = [m for m in rendered if m["kind"] == "ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert httpx.get(f"{new.url}{endpoint['path']}").text.startswith("# HELP flashpoint_")
    assert new.get("/v2/models/attention")[1]["name"] == "attention"  # what KServe's PROTOCOL v2 says of it
