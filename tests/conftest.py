"""Fixtures of all tests, and the place where kernels run: Triton's interpreter, or a GPU (FLASHPOINT_TEST_DEVICE=cuda).

With FLASHPOINT_TEST_ARCH=90 no kernel runs: tests/support/kernels/resolved.py only computes the launches for an sm_90.
TRITON_INTERPRET is set before any import of triton, which reads it when a kernel is decorated.
"""

import contextlib
import gc
import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

DEVICE = os.environ.get("FLASHPOINT_TEST_DEVICE", "cpu")
FUSED = "cpu" if DEVICE == "cpu" else "torch"  # the backend of this device, beside Triton, that does not run tiles
EXPLORING = bool(os.environ.get("FLASHPOINT_TEST_EXPLORE"))  # `make test-full` sets it: hypothesis draws new examples
INTERPRETING = DEVICE == "cpu" and not os.environ.get("FLASHPOINT_TEST_ARCH")
if INTERPRETING:
    os.environ["TRITON_INTERPRET"] = "1"

# The processes of a server do not look for modules in the working folder; some tests give them modules of `tests`.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)

# torch's threads sleep while they wait, as in an engine. Without this, they spin: beside other work on two cores, the
# processor time of some kernel tests rose from 12 s to 99 s. Set before any import of torch, which reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy's threads spin in any case, after each product of matrices: without them, the sweep takes a fifth less.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The modules and tests of a run are millions of objects that live until it ends. A collection that scans them took up
# to 0.5 s, and all collections took 25 s per process. So the collector is off until pytest has collected all tests;
# `pytest_collection_finish` then excludes these objects from every later collection.
gc.disable()

# No example has a deadline, because a busy machine would exceed it. Each run draws the same examples and stores none;
# `make test-full` draws new ones. hypothesis is not installed where `make gpu` runs.
with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile(
        "patient",
        deadline=None,
        database=None,
        derandomize=not EXPLORING,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("patient")


def pytest_report_header():
    """Return the line that says whether the kernels in C are there: without them, `auto` is `tiled` in all tests."""
    native = Path(__file__).parent.parent / "kernels/flashpoint_kernels/native"
    if (native / "libflashpoint.so").exists():
        return "attention on the CPU: kernels in C"
    reason = native / "not-compiled.txt"
    why = reason.read_text() if reason.exists() else "no C compiler was found at the installation"
    return f"attention on the CPU: tiled, without the kernels in C: {why}"


def start_service(**how):
    """Start a server with `tests.support.servers.serve`. Skip the test if torch is missing: every engine needs it."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    from tests.support.servers import serve

    return serve(**how)


# Most CPU seconds of one step of a server's event loop: ten times what a step may need, as caches may be cold.
LONGEST_STEP = 0.05
# Steps of microseconds, ten a second in each server. If even one of these takes milliseconds, a host that takes away
# processors disturbs the CPU clock of threads, and steps within AROUND seconds of it prove nothing.
TRIVIAL, AROUND = ("Service.keep_timing", "_set_result_unless_cancelled"), 1.0
# grpc.aio copies a whole message in one step, a second for a GiB; this library's code cannot cut it into parts.
GRPC = "_handle_exceptions"
RECORD = os.environ.get("FLASHPOINT_TEST_STEPS")  # a file for a line of JSON for each step over 5 ms, with its test


@pytest.fixture(autouse=True)
def steps(request):
    """Fail the test that made a server's event loop run for longer than LONGEST_STEP at a time."""
    yield
    noted = [line | {"test": request.node.nodeid} for line in _new_steps()]
    if RECORD and noted:
        with open(RECORD, "a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(line)}\n" for line in noted))
    disturbed = [line["at"] for line in noted if line["step"] in TRIVIAL]
    long = [
        line
        for line in noted
        if line["seconds"] > LONGEST_STEP
        and line["step"] != GRPC
        and not any(abs(line["at"] - at) < AROUND for at in disturbed)
    ]
    assert not long, f"the event loop of a server ran for too long: {long}"


def _new_steps():
    """Return the steps that servers have noted since the last call."""
    servers = sys.modules.get("tests.support.servers")  # without it, there is no server
    if servers is None or not servers.STEPS.exists():
        return []
    lines = servers.STEPS.read_text().splitlines()
    new, servers.read = lines[servers.read :], len(lines)
    return [json.loads(line) for line in new]


@pytest.fixture(scope="session")
def server():
    """Yield a server with default settings. All tests of a pytest process share it and must not change its state."""
    server = start_service()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rpc_server():
    """Yield a server with gRPC, 1 MiB of shared memory and small size limits. Tests must not change its state."""
    server = start_service(
        grpc_port=0, shared_memory_bytes=1 << 20, body_limit=4 << 20, json_limit=1 << 20, log_level="debug"
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def start_server():
    """Yield a function `start_server(ready=True, interpret=False, **settings)`. Its servers stop after the module."""
    with contextlib.ExitStack() as stack:

        def start(**how):
            server = start_service(**how)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def url(request):
    """Return the URL of an Open Inference Protocol server: FLASHPOINT_OIP_URL, or that of the fixture `server`."""
    return os.environ.get("FLASHPOINT_OIP_URL", "").rstrip("/") or request.getfixturevalue("server").url


@pytest.fixture(scope="session")
def receiver():
    """Yield an OpenTelemetry receiver (OTLP), which records the trace spans that the server `gated` sends."""
    from tests.support.otlp import Receiver

    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="session")
def gated(receiver, tmp_path_factory):
    """Yield a server with interpreted Triton kernels, whose engine waits or fails for requests with certain ids.

    All tests of a pytest process share it. The engine waits at a gate while the gate's file is missing: each test must
    restore the files that it deletes, and leave a ready engine. The server has 256 MiB of staging memory. It times out
    a body, or an answer's reader, that stalls for two seconds.
    """
    from tests.support.gated import GatedServer

    settings = {"body_timeout": 2, "body_rate": 1 << 30, "staging_bytes": 256 << 20, "otlp_endpoint": receiver.url}
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds between two exports of trace spans
    gated = GatedServer(start_service, tmp_path_factory.mktemp("gates"), interpret=True, environment=soon, **settings)
    yield gated
    gated.server.stop()


# Servers of which one start is enough for a run: all files whose tests or fixtures take one run in one process.
SHARED = ("gated", "held", "cache_server", "saved_server", "strict", "rpc_server")
ALSO = {"locked": "held", "caller": "rpc_server"}  # fixtures of the same servers
TAKES = re.compile(rf"^ *(?:async )?def \w+\([^)]*\b({'|'.join((*SHARED, *ALSO))})\b", re.MULTILINE)


@cache
def group_of(file):
    """Return the shared server that a test file takes, the first one in SHARED, or else the file itself."""
    found = {ALSO.get(name, name) for name in TAKES.findall((Path(__file__).parents[1] / file).read_text())}
    return next((name for name in SHARED if name in found), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Share out files as `--dist loadfile` does, those of one group to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid.split("::")[0])

    return ByServer(config, log)


# The slowest test files. They start first, so that no process still runs one of them when the others have ended.
LONG = (
    "test_sweep.py", "test_corpus.py", "test_gpu_run.py", "test_build.py", "test_chaos.py", "test_tutorial.py",
    "test_artefacts.py", "test_cases.py", "test_derivatives.py", "test_self_test.py", "test_verified_while_serving.py",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Move the files in LONG to the front, and keep the random order otherwise."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Start the garbage collector, without the modules and tests that exist now: it scans only newer objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
