"""The servers of the suite. `url` is one of ours, or the one that FLASHPOINT_OIP_URL names, if it has our models."""

import os

import pytest

URL = os.environ.get("FLASHPOINT_OIP_URL", "")
MIB = 1 << 20


@pytest.fixture(scope="session")
def url(request):
    return URL.rstrip("/") or request.getfixturevalue("server").url


@pytest.fixture(scope="session")
def rpc_server():
    """A server with gRPC, shared memory and small limits; a test must leave it as it found it."""
    from tests.support.servers import serve

    server = serve(grpc_port=0, shared_memory_bytes=MIB, body_limit=4 * MIB, json_limit=MIB, log_level="debug")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def held(tmp_path_factory):
    """A server with gRPC, keys, shared memory and smaller limits, whose launches wait at gates; shared, too."""
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
    )
    yield held
    held.stop()
