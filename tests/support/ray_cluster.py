"""Real one-node Ray clusters with the service on CPU replicas: `deploy(…)` writes a configuration and serves it."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import yaml

from tests.support.servers import wait_for
from tests.support.sockets import free_port

DRIVER = Path(__file__).with_name("ray_driver.py")
ENGINE = "flashpoint_server.engine.process"
# Ray's processes and two engines that import torch start in 15 s on an idle machine with two cores, else in minutes.
START_SECONDS = 900
END_SECONDS = 900
# Variables that Ray does not inherit: they would redirect Ray or a replica, or measure coverage in each process of Ray.
OTHERS = ("FLASHPOINT_", "RAY_", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "COVERAGE_")


class Cluster:
    """A `serve run` of one application on a port of 127.0.0.1; `lines` is the output of Ray and the replicas."""

    def __init__(self, directory, deployment, arguments, gpus, environment):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        configuration = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "flashpoint",
                    "route_prefix": "/",
                    "import_path": "flashpoint_server.ray:app",
                    "args": {"device": "cpu", **arguments},
                    "deployments": [{"name": "Flashpoint", **deployment}],
                }
            ],
        }
        path = Path(directory, "serve.yaml")
        path.write_text(yaml.safe_dump(configuration))
        self.process = subprocess.Popen(
            [sys.executable, DRIVER, directory, "8", str(gpus), str(START_SECONDS), path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(OTHERS)},
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
                "RAY_DEDUP_LOGS": "0",  # else Ray prints a repeated line only after a further line
                "RAY_raylet_start_wait_time_s": str(START_SECONDS),
                "RAY_worker_niceness": "0",  # else a replica cannot start on a busy machine
                # Else Ray would replace a proxy that is slow on a busy machine.
                "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(START_SECONDS),
                "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(START_SECONDS),
                **environment,
            },
        )
        self.lines = []
        self._below = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def below(self, name):
        """Return the cluster's descendant processes whose command line begins with `name` or has it as an argument."""
        results = []
        self._below |= set(psutil.Process(self.process.pid).children(recursive=True))
        for process in self._below:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if command and (command[0].startswith(name) or name in command):
                    results.append(process)
        return results

    @property
    def replicas(self):
        return self.below("ray::ServeReplica:")

    @property
    def ready(self):
        """Return how many replicas have logged that they are ready."""
        ready_lines = [line for line in self.lines if '"event":"ready"' in line and '"flashpoint.engine"' in line]
        return len({re.search(r"pid=(\d+)", line)[1] for line in ready_lines})

    def get(self, path):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def inside(self):
        """Return the number of requests inside the replica that answers."""
        return json.loads(self.get("/info")[1])["load"]["requests"]

    def wait_ready(self, replicas):
        def ready():
            with contextlib.suppress(OSError):  # Ray may restart its proxies while it starts
                return self.ready >= replicas and self.get("/health/ready")[0] == 200

        ended = lambda: self.process.poll() is not None  # noqa: E731
        wait_for(ready, lambda: "".join(self.lines), stop=ended, seconds=START_SECONDS)
        return self

    def interrupt(self):
        """Interrupt the cluster as ^C does: the application ends first, then Ray."""
        self.below("")  # adds all present processes to those that `stop` checks
        self.process.send_signal(signal.SIGINT)

    def stop(self):
        """End the cluster, and check that none of its processes remains."""
        if self.process.poll() is None:
            self.interrupt()
        try:
            self.process.wait(END_SECONDS)
            _, left = psutil.wait_procs(self._below, END_SECONDS)
            assert not left, left
        finally:
            for process in self._below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()


@contextlib.contextmanager
def deploy(replicas=1, *, gpus=0, haproxy=False, deployment=(), environment=(), **settings):
    """Start the service with this number of replicas, wait until all are ready, and yield the cluster.

    `deployment` has Ray's options of the replicas, `settings` the service's.
    """
    # In /tmp, because Ray's sockets are in this directory, and their paths may have at most about 100 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        variables = {**(behind_haproxy(directory) if haproxy else {}), **dict(environment)}
        scale = {} if "autoscaling_config" in deployment else {"num_replicas": replicas}
        cluster = Cluster(directory, {**scale, **dict(deployment)}, settings, gpus, variables)
        try:
            yield cluster.wait_ready(replicas)
        finally:
            cluster.stop()


def behind_haproxy(directory):
    """Return variables that replace Ray's proxy by HAProxy, with its files in the directory and free ports."""
    files = {"CONFIG_FILE_LOC": "cfg", "SOCKET_PATH": "admin", "METRICS_SOCKET_PATH": "metrics"}
    states = {"SERVER_STATE_BASE": ".", "SERVER_STATE_FILE": "state"}
    variables = {name: f"{directory}/haproxy/{file}" for name, file in (files | states).items()}
    variables |= {name: str(free_port()) for name in ("METRICS_PORT", "STATS_PORT")}
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # 30 by default, for external load balancers
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        **{f"RAY_SERVE_HAPROXY_{name}": value for name, value in variables.items()},
    }
