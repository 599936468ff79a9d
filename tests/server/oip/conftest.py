"""Fixtures of the tests of the Open Inference Protocol: servers that several test files share."""

import contextlib

import pytest

MIB = 1 << 20


@pytest.fixture(scope="session")
def held(tmp_path_factory):
    """Yield a server with gRPC, API keys, shared memory and small limits. Tests can make its launches wait."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    from tests.support.oip.held import HeldServer

    held = HeldServer(
        tmp_path_factory.mktemp("gates"),
        interpret=True,
        queue_limit=8,
        api_keys="all,asks:attention,looks:info,counts:metrics",
        shared_memory_bytes=MIB,
        body_limit=MIB,
        json_limit=65536,
        head_limit=4096,
        grpc_bytes=64 * MIB,
    )
    yield held
    held.stop()


@pytest.fixture(scope="session")
def locked(held):
    """Return the server of `held`, for tests that need only its API keys and small limits."""
    return held.server


@pytest.fixture
def private_server(tmp_path):
    """Yield a factory of servers for one test, which may stop them or kill their engines."""
    from tests.support.oip.held import HeldServer

    with contextlib.ExitStack() as stack:

        def start(**settings):
            private_server = HeldServer(tmp_path, **settings)
            stack.callback(private_server.stop)
            return private_server

        yield start
