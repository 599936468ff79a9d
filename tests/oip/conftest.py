"""The servers of the suite. `url` is a server of ours, or the one in FLASHPOINT_OIP_URL, if it has our models."""

import os

import pytest

URL = os.environ.get("FLASHPOINT_OIP_URL", "")
MIB = 1 << 20


@pytest.fixture(scope="session")
def url(request):
    return URL.rstrip("/") or request.getfixturevalue("server").url


@pytest.fixture(scope="session")
def held(tmp_path_factory):
    """Start a shared server with gRPC, keys, shared memory and smaller limits, whose launches wait at gates."""
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
