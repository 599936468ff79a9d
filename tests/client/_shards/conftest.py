import pytest


@pytest.fixture(scope="module")
def clients(server):
    """Yield three clients of one server, which stand for three servers."""
    from tests.support.sharded import clients_of  # needs torch

    with clients_of(server, server, server) as clients:
        yield clients


@pytest.fixture
def left(server):
    """Return a function that returns the ids of the caches created since the test began that still exist."""
    from tests.support.sockets import held_since

    return held_since(server)
