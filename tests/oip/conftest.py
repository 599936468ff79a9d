"""The server that the suite asks: one of ours, or whatever FLASHPOINT_OIP_URL names, as long as it has our models."""

import os

import pytest

from tests.e2e.conftest import serve

URL = os.environ.get("FLASHPOINT_OIP_URL", "")


@pytest.fixture(scope="session")
def url():
    if URL:
        yield URL.rstrip("/")
        return
    server = serve()
    yield server.url
    server.stop()
