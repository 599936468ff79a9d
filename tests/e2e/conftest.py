"""Clients that several files share."""

import pytest


@pytest.fixture(scope="module")
def connected(server):
    from tests.support.jax_calls import Counted

    with Counted(server.url) as client:
        yield client


@pytest.fixture
def jax_client(connected):
    """A client that counts its calls; none so far."""
    connected.asked = ()
    return connected
