"""The server that the suite asks: one of ours, or whatever FLASHPOINT_OIP_URL names, as long as it has our models."""

import os

import pytest

URL = os.environ.get("FLASHPOINT_OIP_URL", "")


@pytest.fixture(scope="session")
def url(request):
    return URL.rstrip("/") or request.getfixturevalue("server").url
