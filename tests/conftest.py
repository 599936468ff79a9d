"""Choose where kernels run: under Triton's interpreter, or on a GPU with FLASHPOINT_TEST_DEVICE=cuda (`make gpu`).

With FLASHPOINT_TEST_ARCH=90 nothing runs: tests/support/kernels/resolved.py resolves launches as for an sm_90. The
choice is made before any import of triton, which reads it when a kernel is decorated.
"""

import contextlib
import gc
import os

import pytest

DEVICE = os.environ.get("FLASHPOINT_TEST_DEVICE", "cpu")
EXPLORING = bool(os.environ.get("FLASHPOINT_TEST_EXPLORE"))  # by `make test-full`
INTERPRETING = DEVICE == "cpu" and not os.environ.get("FLASHPOINT_TEST_ARCH")
if INTERPRETING:
    os.environ["TRITON_INTERPRET"] = "1"

# torch's threads sleep while they wait, as in an engine. Beside other work on two cores, spinning raised the processor
# time of some kernel tests from 12 s to 99 s. Set before any import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The modules and tests of a run are millions of objects that live to its end. Collecting garbage among them took each
# process up to 0.5 s at a time, 25 s in all. The collector waits until all tests are known, and then leaves them out.
gc.disable()

# A busy machine must not fail an example for its time. Examples are the same in every run, without stored ones of
# earlier runs; `make test-full` draws others. `make gpu` runs without hypothesis.
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


def start_service(**how):
    """Start a server as `tests.support.servers.serve`; skip the test without torch, which every engine needs."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    from tests.support.servers import serve

    return serve(**how)


@pytest.fixture(scope="session")
def server():
    """Start a server with default settings; all tests of a pytest process share it and must leave it unchanged."""
    server = start_service()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rpc_server():
    """Start a server with gRPC, shared memory and small limits; a test must leave it unchanged."""
    server = start_service(
        grpc_port=0, shared_memory_bytes=1 << 20, body_limit=4 << 20, json_limit=1 << 20, log_level="debug"
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def start_server():
    """Return `start_server(ready=True, interpret=False, **settings)`; its servers end with the module."""
    with contextlib.ExitStack() as stack:

        def start(**how):
            server = start_service(**how)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def url(request):
    """Return the address of a server with the models of the Open Inference Protocol: FLASHPOINT_OIP_URL, or ours."""
    return os.environ.get("FLASHPOINT_OIP_URL", "").rstrip("/") or request.getfixturevalue("server").url


@pytest.fixture(scope="session")
def receiver():
    """Start a receiver of the spans that `gated` sends."""
    from tests.support.otlp import Receiver

    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="session")
def gated(receiver, tmp_path_factory):
    """Start a server with interpreted Triton kernels, whose engine waits and fails on demand.

    All tests of a pytest process share it: a test opens its gates again and leaves a ready engine. It has little
    shared memory, and gives up a body or an answer that pauses for two seconds.
    """
    from tests.support.gated import GatedServer

    settings = {"body_timeout": 2, "body_rate": 1 << 30, "staging_bytes": 256 << 20, "otlp_endpoint": receiver.url}
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # milliseconds
    gated = GatedServer(start_service, tmp_path_factory.mktemp("gates"), interpret=True, environment=soon, **settings)
    yield gated
    gated.server.stop()


# The slowest test files. They start first, so that no process still runs one of them when the others have ended.
LONG = ("test_corpus.py", "test_gpu_run.py", "test_build.py", "test_chaos.py", "test_tutorial.py", "test_artefacts.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Move the files in LONG to the front, and keep the random order otherwise."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let the garbage collector begin, with what the tests make alone."""
    gc.collect()
    gc.freeze()
    gc.enable()
