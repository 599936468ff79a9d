import pytest


@pytest.fixture(scope="module")
def clients(server):
    """Return three clients of one server, in the place of three servers."""
    from tests.support.sharded import clients_of  # needs torch

    with clients_of(server, server, server) as clients:
        yield clients


@pytest.fixture
def left(server):
    """Return a function that lists the caches that the server holds since the test began."""
    from tests.support.sockets import held_since

    return held_since(server)
