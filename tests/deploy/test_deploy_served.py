"""Real servers answer Kubernetes' probes, and a rolling update loses no call.

Two server processes act as the old and the new pod, and a TCP balancer acts as the Service. When the new pod is ready,
the balancer sends new connections to it, and the old pod gets SIGTERM.
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
from tests.support.gated import GatedServer
from tests.support.messages import message, normal, post
from tests.support.servers import wait_for

CALLERS = 3
TENSORS = {name: normal(1, 1, 2, 4, seed=seed) for seed, name in enumerate(["q", "k", "v", "do"])}
FORWARD = message({name: TENSORS[name] for name in "qkv"})
BACKWARD = message(TENSORS, backend="reference")


class Service:
    """A TCP balancer that sends new connections to the port `target` and keeps open connections, like kube-proxy."""

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
        finally:  # close after cancellation, too: the warning about an unclosed connection would fail another test
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


@pytest.mark.slow
def test_no_call_is_lost_when_a_pod_is_replaced(start_server, tmp_path, service_to):
    new = start_server(ready=False)
    gated = GatedServer(start_server, tmp_path, shutdown_timeout=3600)
    old = gated.server
    service = service_to(old.port)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 16, 32), np.float32) for _ in "qkv")
    answers = [[] for _ in range(CALLERS)]
    over = threading.Event()

    def call(given):
        with flashpoint.Client(service.url, timeout=600) as client:
            while not over.is_set():
                given.append(client.attention(q, k, v, causal=True))

    with ThreadPoolExecutor() as pool:
        calling = [pool.submit(call, given) for given in answers]
        try:
            wait_for(lambda: all(answers), lambda: "a caller was not answered")
            new.wait_ready()
            begun = pool.submit(post, service, "/attention/grad", BACKWARD, x_request_id="gate-begun")
            gated.wait_begun("gate-begun")
            service.target = new.port
            old.process.send_signal(signal.SIGTERM)
            old.wait_for_line(lambda line: line["event"] == "draining")
            # `Connection: close` makes the client reconnect, and so reach the new pod before its retries run out.
            refused = post(old, "/attention", FORWARD)
            assert (refused.status, refused.json["code"]) == (503, "draining")
            assert refused.headers["connection"] == "close"
            gated.gate("gate").touch()
            assert begun.result().status == 200
            assert old.wait_exit() == 0
            counts = [len(given) for given in answers]
            wait_for(
                lambda: all(len(given) > count for given, count in zip(answers, counts, strict=True)),
                lambda: "a caller was left behind",
            )
        finally:
            gated.gate("gate").touch()
            over.set()
        for caller in calling:
            caller.result()
    new.wait_for_line(lambda line: line["event"] == "request" and line["route"] == "/attention")
    first = answers[0][0]
    assert all(np.array_equal(answer, first) for given in answers for answer in given)


def test_probes_and_prometheus_ask_what_the_server_answers(server):
    charts = pytest.importorskip(
        "tests.support.charts",
        reason="pip install helm-python-sdk (not built for all platforms)",
    )
    rendered = charts.render(charts.EXAMPLES["everything"])
    (chart,) = [m["spec"]["template"]["spec"]["containers"][0] for m in rendered if m["kind"] == "Deployment"]
    kserve = yaml.safe_load((charts.DEPLOY / "kserve/inferenceservice.yaml").read_text())["spec"]["predictor"]
    for container in (chart, *kserve["containers"]):
        paths = [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")]
        assert [path.rpartition("/")[2] for path in paths] == ["ready", "ready", "live"]
        assert [server.get(path)[0] for path in paths] == [200, 200, 200]
    (monitor,) = [m for m in rendered if m["kind"] == "ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert httpx.get(f"{server.url}{endpoint['path']}", timeout=60).text.startswith("# HELP flashpoint_")
    assert server.get("/v2/models/attention")[1]["name"] == "attention"  # by KServe's protocol v2
