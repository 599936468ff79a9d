"""Where kernels run in tests: under Triton's interpreter, or on a GPU when FLASHPOINT_TEST_DEVICE=cuda (`make gpu`).

With FLASHPOINT_TEST_ARCH=90 nothing runs: tests/support/kernels/resolved.py resolves launches as for a GPU of sm_90.
Set before anything imports triton, which decides when a kernel is decorated.
"""

import contextlib
import os

import pytest

DEVICE = os.environ.get("FLASHPOINT_TEST_DEVICE", "cpu")
INTERPRETING = DEVICE == "cpu" and not os.environ.get("FLASHPOINT_TEST_ARCH")
if INTERPRETING:
    os.environ["TRITON_INTERPRET"] = "1"

# torch's threads sleep while they wait, as those of an engine do. Beside other work on two cores, spinning made the
# 12 s of processor time that some tests of the kernels take 99. Set before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Nobody's example is wrong for taking long on a machine with much else to do. Examples are the same in every run, and
# none begins with those that another has left; `make test-full` draws others. `make gpu` does without hypothesis.
with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile(
        "patient",
        deadline=None,
        database=None,
        derandomize=not os.environ.get("FLASHPOINT_TEST_EXPLORE"),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def server():
    """A server with default settings, which all tests of a pytest process share: leave it as you found it."""
    from tests.support.servers import serve

    server = serve()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rpc_server():
    """A server with gRPC, shared memory and small limits; a test must leave it as it found it."""
    from tests.support.servers import serve

    server = serve(grpc_port=0, shared_memory_bytes=1 << 20, body_limit=4 << 20, json_limit=1 << 20, log_level="debug")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def start_server():
    """A factory: `start_server(ready=True, interpret=False, **settings)`; what it starts ends with the module."""
    from tests.support.servers import serve

    with contextlib.ExitStack() as stack:

        def start(**how):
            server = serve(**how)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def receiver():
    """A receiver of the spans that `gated` sends."""
    from tests.support.otlp import Receiver

    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="session")
def gated(receiver, tmp_path_factory):
    """A server with Triton's kernels under its interpreter, whose engine waits and fails on demand.

    All tests of a pytest process share it: open its gates again, and leave an engine that is ready. It has little
    shared memory, and gives up a body, or the reading of an answer, that pauses for two seconds.
    """
    from tests.support.gated import GatedServer
    from tests.support.servers import serve

    settings = {"body_timeout": 2, "body_rate": 1 << 30, "staging_bytes": 256 << 20, "otlp_endpoint": receiver.url}
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds
    gated = GatedServer(serve, tmp_path_factory.mktemp("gates"), interpret=True, environment=soon, **settings)
    yield gated
    gated.server.stop()


# The files of tests that take longest. They begin first, so that no process has one of them left when the others end.
LONG = ("test_corpus.py", "test_gpu_run.py", "test_native.py", "test_chaos.py", "test_tutorial.py", "test_artefacts.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the random order but for LONG."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
