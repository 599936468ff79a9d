"""The CPU image is built by a Docker engine, and its containers serve requests: `make image-test`.

engine.py finds or starts the engine; if it cannot, the tests are skipped. Requests use the containers' published ports.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

import flashpoint
from tests.docker.engine import ROOT, UnavailableError, engine
from tests.docker.test_dockerfile import Compose
from tests.support.sockets import free_port

pytestmark = pytest.mark.image
IMAGE = "flashpoint:cpu"
BASE = "debian:12.12-slim"
BUILD_SECONDS = int(os.environ.get("IMAGE_BUILD_SECONDS", "420"))
PATIENCE = 180  # seconds; a longer wait is a hang
READ_ONLY = (
    "--read-only", "--tmpfs=/tmp", "--tmpfs=/var/cache/triton:exec,uid=10001", "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)  # fmt: skip
Q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)


def wait(condition, message):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.1)  # between two polls


@pytest.fixture(scope="module")
def docker():
    """Build the image, print the build time and the sizes of its layers, and yield the Docker engine that has it."""
    with contextlib.ExitStack() as stack:
        try:
            daemon = stack.enter_context(engine())
            base = daemon.provide(BASE, wheels=True)
        except UnavailableError as error:
            pytest.skip(str(error))
        # In a minimal Debian that replaces the base image, torch comes from the index of pip's configuration.
        index = os.environ.get("TORCH_INDEX", "" if "Debian" in base else None)
        argument = [] if index is None else ["--build-arg", f"TORCH_INDEX={index}"]
        try:
            took = daemon.build(IMAGE, "--build-arg", "DEVICE=cpu", *argument, seconds=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the image is not built after {BUILD_SECONDS} s: IMAGE_BUILD_SECONDS sets another limit")
        except RuntimeError:
            try:
                daemon.check_registries(BASE)
            except UnavailableError as error:
                pytest.skip(str(error))
            raise
        print(
            f"\nbase image: {base}; built in {took.seconds:.0f} s; {daemon.size(IMAGE) / 1e9:.2f} GB in these layers:"
        )
        for size, instruction in daemon.layers(IMAGE):
            print(f"  {size:>8}  {instruction[:100]}")
        yield daemon


class Container:
    """A running container of the image. Its port 8000 is published on the host's loopback interface."""

    def __init__(self, docker, *flags, image=IMAGE):
        self.docker = docker
        self.id = docker.docker("run", "-d", "-p", "127.0.0.1::8000", *flags, image).stdout.strip()

    @property
    def url(self):
        return "http://" + self.docker.docker("port", self.id, "8000").stdout.split()[0]

    def client(self, **how):
        return flashpoint.Client(self.url, **how)

    def state(self, field):
        return self.docker.docker("inspect", "-f", f"{{{{{field}}}}}", self.id).stdout.strip()

    def logs(self):
        run = self.docker.docker("logs", self.id)
        return run.stdout + run.stderr

    def run(self, *command):
        return self.docker.docker("exec", self.id, *command).stdout

    def ready(self, **how):
        """Wait until the server in the container is ready; return the container. `how`: the client's arguments."""

        def there():
            with contextlib.suppress(flashpoint.FlashpointError, RuntimeError), self.client(**how) as client:
                return client.ready()

        wait(there, lambda: f"{self.state('.State.Status')}: {self.logs()[-3000:]}")
        return self

    def remove(self):
        self.docker.docker("rm", "-f", self.id)


@pytest.fixture
def run(docker):
    """Yield a function that starts a container with the given flags of `docker run`. The test's end removes them."""
    with contextlib.ExitStack() as stack:

        def start(*flags):
            container = Container(docker, *flags)
            stack.callback(container.remove)
            return container

        yield start


def expected(q):
    p = np.exp(q.astype(np.float64) @ q.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    return p / p.sum(-1, keepdims=True) @ q


def keys(folder, **named):
    """Write a key file with these names and API keys, and rename it to `keys.toml` in the mounted folder."""
    text = "".join(
        f'[{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nrights = ["attention", "info"]\n'
        for name, key in named.items()
    )
    (folder / "new").write_text(text)
    (folder / "new").chmod(0o644)
    (folder / "new").rename(folder / "keys.toml")


@pytest.fixture
def readable(tmp_path):
    """Return a folder that user 10001, which runs the server in a container, can read."""
    folder = tmp_path / "keys"
    folder.mkdir()
    for parent in (folder, *folder.parents):
        if parent.owner() == folder.owner() and parent != Path("/"):
            with contextlib.suppress(PermissionError):
                parent.chmod(parent.stat().st_mode | 0o055)
    return folder


def test_it_serves_both_formats_hardened_with_keys_that_rotate_and_stops(run, readable):
    keys(readable, alice="first")
    container = run(
        *READ_ONLY, "--health-interval=1s", "-v", f"{readable}:/etc/flashpoint:ro",
        "-e", "FLASHPOINT_API_KEYS_FILE=/etc/flashpoint/keys.toml",
    ).ready(api_key="first")  # fmt: skip
    with container.client(api_key="first") as client:
        np.testing.assert_allclose(client.attention(Q, Q, Q), expected(Q), atol=1e-6)
    body = json.dumps({name: Q.tolist() for name in "qkv"}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer first"}
    with urllib.request.urlopen(urllib.request.Request(f"{container.url}/attention", body, headers)) as answer:
        np.testing.assert_allclose(json.load(answer)["o"], expected(Q), atol=1e-6)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(f"{container.url}/info"))

    assert container.run("id", "-u").strip() == "10001"
    assert "CapEff:\t0000000000000000" in container.run("cat", "/proc/1/status")
    with pytest.raises(RuntimeError, match="Read-only file system"):
        container.run("touch", "/home/flashpoint/file")
    wait(lambda: container.state(".State.Health.Status") == "healthy", container.logs)

    keys(readable, alice="second")

    def taken(key):
        with container.client(api_key=key, retries=0) as client:
            try:
                client.info()
            except flashpoint.AuthenticationError:
                return False
        return True

    wait(lambda: taken("second") and not taken("first"), container.logs)

    container.docker.docker("stop", "--time", "40", container.id)
    assert (container.state(".State.ExitCode"), container.state(".State.OOMKilled")) == ("0", "false")
    events = [json.loads(line)["event"] for line in container.logs().splitlines() if line.startswith("{")]
    assert {"listening", "request", "draining", "stopped"} <= set(events)
    assert "first" not in container.logs()
    assert "second" not in container.logs()


def test_variables_are_settings_and_two_containers_share_nothing(run):
    one, other = run("-e", "FLASHPOINT_BODY_LIMIT=1000000"), run()
    with one.ready().client() as first, other.ready().client() as second:
        with pytest.raises(flashpoint.FlashpointError, match="1000000"):
            first.attention(*np.zeros((3, 1, 1, 10_000, 64), np.float32))
        second.attention(*np.zeros((3, 1, 1, 10_000, 64), np.float32)[:, :, :, :2000])
        with first.cache(kv_heads=2, head_dim=8) as cache:
            cache.attention(Q, Q, Q)
            listed = [json.load(urllib.request.urlopen(f"{c.url}/caches"))["caches"] for c in (one, other)]
            assert [len(caches) for caches in listed] == [1, 0]


def test_a_memory_limit_refuses_work_and_kills_nothing(run):
    """A container of 2 GiB gets large requests: the kernel kills no process, and the server answers a later request."""
    container = run("-m", "2g", "--memory-swap", "2g").ready()
    large = np.zeros((1, 1, 1 << 21, 64), np.float32)  # 512 MiB for q, and as much for the answer
    started = container.state(".State.StartedAt")
    with container.client(timeout=PATIENCE, retries=0) as client:
        with contextlib.suppress(flashpoint.FlashpointError):
            client.attention(large, *np.zeros((2, 1, 1, 1, 64), np.float32))
        with pytest.raises(flashpoint.FlashpointError):
            client.cache(kv_heads=64, head_dim=256, value_dim=256, max_length=1 << 20)
        container.ready()
        np.testing.assert_allclose(client.attention(Q, Q, Q), expected(Q), atol=1e-6)
    assert container.state(".State.StartedAt") == started
    assert container.state(".State.OOMKilled") == "false"


def test_a_killed_engine_and_a_killed_server_start_again(run):
    container = run("--restart=unless-stopped").ready()
    script = (
        "import os, signal, sys\n"
        "for pid in filter(str.isdecimal, os.listdir('/proc')):\n"
        "    if b'engine.'b'process' in open(f'/proc/{pid}/cmdline', 'rb').read(): os.kill(int(pid), signal.SIGKILL)\n"
    )
    container.run("python", "-c", script)
    wait(lambda: "engine" in container.logs() and container.ready(), container.logs)
    with container.client() as client:
        np.testing.assert_allclose(client.attention(Q, Q, Q), expected(Q), atol=1e-6)
    pid = container.state(".State.Pid")
    kill = ["--rm", "--pid=host", "--user=0", "--entrypoint=python", IMAGE, "-c", f"import os; os.kill({pid}, 9)"]
    container.docker.docker("run", *kill)
    wait(lambda: container.state(".RestartCount") == "1", container.logs)
    with container.ready().client() as client:
        np.testing.assert_allclose(client.attention(Q, Q, Q), expected(Q), atol=1e-6)


def test_compose_runs_the_service_and_prometheus_scrapes_it(docker, tmp_path):
    """Run compose.yaml with the CPU image and no Grafana. In a new engine, Prometheus comes from a Debian package."""
    compose = shutil.which("docker-compose")
    if compose is None:
        pytest.skip("no docker-compose: install docker-compose")
    services = yaml.load((ROOT / "compose.yaml").read_text(), Compose)["services"]
    cpu = yaml.load((ROOT / "deploy/docker/cpu.yaml").read_text(), Compose)["services"]["flashpoint"]
    service = {name: value for name, value in services["flashpoint"].items() if name not in {*cpu, "build"}}
    prometheus = services["prometheus"]
    if docker.own:
        text = (
            f"FROM {BASE}\nRUN apt-get update && apt-get install --yes --no-install-recommends prometheus\n"
            'WORKDIR /prometheus\nENTRYPOINT ["prometheus"]\n'
        )
        (tmp_path / "Dockerfile").write_text(text)
        docker.build(prometheus["image"], context=tmp_path)
    elif not docker.pulls(prometheus["image"]):
        pytest.skip(f"{prometheus['image']} cannot be pulled")
    ports = {8000: free_port(), 9090: free_port()}
    service |= {"image": IMAGE, "ports": [f"127.0.0.1:{here}:{there}" for there, here in ports.items()]}
    prometheus["volumes"] = [volume.replace("./", f"{ROOT}/", 1) for volume in prometheus["volumes"]]
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump({"version": "3.8", "services": {"flashpoint": service, "prometheus": prometheus}}))
    command = [compose, "-p", "flashpoint-test", "-f", file]
    up = subprocess.run(
        [*command, "up", "-d"], env=docker.environment, capture_output=True, text=True, timeout=PATIENCE
    )
    try:
        assert up.returncode == 0, up.stderr
        with flashpoint.Client(f"http://127.0.0.1:{ports[8000]}") as client:
            wait(client.ready, lambda: "not ready")
            client.attention(Q, Q, Q)
        query = f"http://127.0.0.1:{ports[9090]}/api/v1/query?query=up"

        def scraped():
            with contextlib.suppress(OSError), urllib.request.urlopen(query, timeout=10) as answer:
                return [one["value"][1] for one in json.load(answer)["data"]["result"]] == ["1"]

        wait(scraped, lambda: docker.docker("ps", "-a").stdout)
    finally:
        subprocess.run([*command, "down", "-t", "40"], env=docker.environment, capture_output=True, timeout=PATIENCE)
