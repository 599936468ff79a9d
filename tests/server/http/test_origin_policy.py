"""A server answers the right hosts and pages: every rule is tested, without a server."""

import pytest

from flashpoint_server.exchange import Exchange
from flashpoint_server.http.origin_policy import OriginPolicy
from flashpoint_server.refusal import Refusal

HERE = "10.0.0.7"  # where the connections of these tests arrive


def answer(sites, host=None, method="POST", path="/attention", **fields):
    """Return the error code of the refusal; None if the request continues."""
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    try:
        sites.check(Exchange(method, path, headers | ({"host": host} if host else {}), "id"), HERE)
    except Refusal as refusal:
        return refusal.code
    return None


LOOPBACK = ("localhost", "localhost:1", "a.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "LOCALHOST.")


OTHERS = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "0.0.0.0",
    "192.0.2.1",
    "notlocalhost",
    "[::2]",
)


def test_a_server_that_anybody_may_call_on_loopback_answers_to_loopback_names():
    sites = OriginPolicy((), ())
    assert {answer(sites, host) for host in (*LOOPBACK, *OTHERS)} == {None}
    sites.only_loopback()
    for _ in range(2):  # the second time from the cache
        assert {answer(sites, host) for host in (None, *LOOPBACK)} == {None}
        assert {answer(sites, host) for host in OTHERS} == {"host_not_allowed"}


@pytest.mark.parametrize("only_loopback", [False, True])
def test_allowed_hosts(only_loopback):
    sites = OriginPolicy(("A.example", "*.b.example", "[::2]"), ())
    if only_loopback:
        sites.only_loopback()
    allowed = ("a.example:80", "x.b.example", "x.y.B.example.", "[::2]:1", *LOOPBACK)
    assert {answer(sites, host) for host in allowed} == {None}
    assert {answer(sites, host) for host in ("b.example", "xb.example", "x.a.example")} == {"host_not_allowed"}
    assert answer(sites, f"{HERE}:8000") is None  # a probe, or Prometheus: the address that the connection reached
    assert answer(sites, "10.0.0.8:8000") == "host_not_allowed"


def test_any_host():
    sites = OriginPolicy(("*",), ())
    sites.only_loopback()
    assert answer(sites, "evil.example") is None


OWN, OTHER, FRIEND = "http://a.example:8000", "http://evil.example", "https://friend.example"


NAVIGATES = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, None),
        ({"sec_fetch_site": "same-origin", "origin": OWN}, None),
        ({"sec_fetch_site": "none"}, None),
        ({"origin": OWN}, None),
        ({"origin": OWN.upper()}, None),
        ({"sec_fetch_site": "cross-site", "origin": FRIEND}, None),
        ({"origin": FRIEND}, None),
        ({"sec_fetch_site": "cross-site"}, "cross_site"),
        ({"sec_fetch_site": "cross-site", "origin": OTHER}, "cross_site"),
        ({"sec_fetch_site": "cross-site", "origin": "null"}, "cross_site"),
        ({"sec_fetch_site": "same-site", "origin": "http://a.example:3000"}, "cross_site"),
        ({"sec_fetch_site": "same-site"}, "cross_site"),
        ({"origin": "http://a.example"}, "cross_site"),  # another port
        ({"origin": OTHER}, "cross_site"),
        ({"origin": "null"}, "cross_site"),
        ({"origin": ""}, "cross_site"),
        (NAVIGATES, "cross_site"),
        (NAVIGATES | {"method": "GET", "path": "/"}, None),
        (NAVIGATES | {"method": "GET", "path": "/docs"}, None),
        (NAVIGATES | {"method": "GET", "path": "/info"}, "cross_site"),
        (NAVIGATES | {"method": "POST", "path": "/"}, "cross_site"),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "method": "GET", "path": "/"}, "cross_site"),
    ],
)
def test_pages_of_other_sites(fields, code):
    assert answer(OriginPolicy((), (FRIEND,)), "a.example:8000", **fields) == code
    assert answer(OriginPolicy((), ("*",)), "a.example:8000", **fields) is None
