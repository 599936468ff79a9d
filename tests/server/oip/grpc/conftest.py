"""Fixtures: a server with gRPC, and a client for it."""

import pytest


@pytest.fixture(scope="module")
def server(rpc_server):
    return rpc_server


@pytest.fixture(scope="module")
def caller(server):
    from tests.support.oip.grpc_calls import Caller, port_of

    caller = Caller(port_of(server))
    yield caller
    caller.close()
