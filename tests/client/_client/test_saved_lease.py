"""Leases free saved forwards: also after an error, and each in the process that saved it."""

import pytest

import flashpoint
from flashpoint._client.saved import Lease, settle
from tests.support.forks import FORKING, in_child


@pytest.fixture
def client(scripted):
    """Yield a client. `scripted.freed()` returns the paths of all forwards that the server was asked to free."""
    scripted.freed = lambda: [path for method, path, *_ in scripted.requests if method == "DELETE"]
    with flashpoint.Client(scripted.url, retries=0) as client:
        yield client


def gone(handler):
    handler.answer(204)


def test_a_forward_that_cannot_be_freed_keeps_no_other_from_it(scripted, client):
    scripted.script.extend([gone, lambda h: h.problem(500), lambda h: h.vanish(), lambda h: h.problem(403), gone])
    leases = [Lease(client, f"saved-{n}") for n in range(5)]
    while leases:
        leases.pop(0).release()
    settle(10)
    assert scripted.freed() == [f"/saved/saved-{n}" for n in range(5)]


@pytest.mark.parametrize("how", [pytest.param(how, marks=FORKING) for how in ("release", "collected")])
def test_a_child_frees_its_own_forwards_and_not_those_of_its_parent(scripted, client, how):
    scripted.script.extend([gone] * 2)
    of_parent = [Lease(client, "of-parent")]

    def end(leases):
        if how == "release":
            leases[0].release()
        leases.clear()

    def child():
        own = [Lease(client, "of-child")]
        end(of_parent)
        end(own)
        settle(10)

    in_child(child)
    assert scripted.freed() == ["/saved/of-child"]
    end(of_parent)
    settle(10)
    assert scripted.freed() == ["/saved/of-child", "/saved/of-parent"]


def test_a_lease_without_init_ends_quietly(recwarn):
    """torch.compile creates `Lease` objects without calling `__init__`."""
    del_ = Lease.__new__(Lease)
    assert del_.saved is None
    del_.__del__()
