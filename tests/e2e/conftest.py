"""Clients that several test files share."""

import pytest


@pytest.fixture(scope="module")
def connected(server):
    from tests.support.jax_calls import Counted

    with Counted(server.url) as client:
        yield client


@pytest.fixture
def jax_client(connected):
    """Return a client that records its calls, with an empty record."""
    connected.asked = ()
    return connected
