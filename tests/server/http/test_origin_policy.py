"""The origin policy refuses requests to other host names and from web pages of other sites.

`OriginPolicy` is tested alone, and then with a server.
"""

import json

import pytest

from flashpoint_server.http.origin_policy import OriginPolicy
from flashpoint_server.http.request import Request
from flashpoint_server.refusal import Refusal
from tests.support.messages import SAFETENSORS, ask, problem, read_metrics, small
from tests.support.raw_http import get, one, post, talk

HERE = "10.0.0.7"  # the IP address at which requests reach the server, in tests of `OriginPolicy`


def answer(sites, host=None, method="POST", path="/attention", **fields):
    """Return the error code if the policy refuses a request with this Host and these fields, or None."""
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    try:
        sites.check(Request(method, path, headers | ({"host": host} if host else {}), "id"), HERE)
    except Refusal as refusal:
        return refusal.code
    return None


LOOPBACK = ("localhost", "localhost:1", "a.localhost", "127.0.0.1", "127.8.9.1:80", "[::1]:8000", "LOCALHOST.",
            "ip6-localhost:1", "ip6-loopback")  # fmt: skip


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
    for _ in range(2):  # the second time from the policy's cache
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
    assert answer(sites, f"{HERE}:8000") is None  # probes and Prometheus use the server's address as Host
    assert answer(sites, "10.0.0.8:8000") == "host_not_allowed"


def test_the_address_of_an_ipv4_connection_to_a_socket_of_ipv6_is_allowed():
    sites = OriginPolicy(("a.example",), ())
    sites.check(Request("GET", "/health", {"host": f"{HERE}:8000"}, "id"), f"::ffff:{HERE}")


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
        ({"origin": "http://a.example"}, "cross_site"),  # differs from the host in its port
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


CLOSE = "Connection: close"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.0.2.1"])
def test_a_name_that_leads_here_is_not_ours(server, host):
    """A server on loopback without API keys refuses other host names, even if they resolve to its address.

    With DNS rebinding, an attacker's name resolves to this server, and a browser lets the attacker's page read answers.
    """
    before = read_metrics(server)["flashpoint_accepted_total"]
    fields = f"Origin: http://{host}", "Sec-Fetch-Site: same-origin", CLOSE
    for sent in (get("/info", *fields, host=f"Host: {host}"), get(f"http://{host}/info", *fields)):
        detail = problem(one(talk(server, sent)), 421, "host_not_allowed")["detail"]
        assert repr(host.partition(":")[0]) in detail
        assert "--allowed-hosts" in detail
    head = post("/attention", small(), SAFETENSORS, *fields).replace(b"Host: localhost", f"Host: {host}".encode())
    problem(one(talk(server, head)), 421, "host_not_allowed")
    refused = one(talk(server, get("/v2/models/attention", *fields, host=f"Host: {host}")))
    assert (refused.status, list(refused.json)) == (421, ["error"])
    assert read_metrics(server)["flashpoint_accepted_total"] == before


@pytest.mark.parametrize("host", ["localhost", "app.localhost:1", "127.3.2.1", "[::1]:8000", "LOCALHOST."])
def test_loopback_names_are_ours(server, host):
    assert one(talk(server, get("/info", CLOSE, host=f"Host: {host}"))).status == 200
    assert one(talk(server, get("http://localhost/info", CLOSE, host="Host: ignored.example"))).status == 200


def test_allowed_hosts_are_answered(strict):
    for host, status in (("attention.example:80", 200), ("a.b.pods.example", 200), ("pods.example", 421), ("x.y", 421)):
        assert one(talk(strict, get("/health", CLOSE, host=f"Host: {host}"))).status == status
    assert strict.get("/health")[1]["live"]  # by the IP address, as probes do


EVIL = ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors")


@pytest.mark.parametrize("fields", [EVIL, EVIL[:1], EVIL[1:], ("Sec-Fetch-Site: same-site",)])
def test_a_page_of_another_site_has_nothing_computed(server, fields):
    """The server refuses cross-site requests before it computes. A POST of text/plain comes without a preflight."""
    before = read_metrics(server)["flashpoint_accepted_total"]
    numbers = {"shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    infer = json.dumps({"inputs": [{"name": name, **numbers} for name in "qkv"]}).encode()
    path = "/v2/models/attention/infer"
    assert one(talk(server, post(path, infer, "text/plain", CLOSE))).status == 200
    refused = one(talk(server, post(path, infer, "text/plain", CLOSE, *fields)))
    assert refused.status == 403
    assert "--cors-origins" in refused.json["error"]
    problem(one(talk(server, post("/benchmark", b"{}", "text/plain", CLOSE, *fields))), 403, "cross_site")
    problem(one(talk(server, get("/metrics", CLOSE, *fields))), 403, "cross_site")
    assert read_metrics(server)["flashpoint_accepted_total"] == before + 1


def test_links_of_other_sites_lead_to_the_page_and_the_documentation(server):
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert [ask(server, path, **link).status for path in ("/", "/docs", "/info")] == [200, 200, 403]


def test_pages_of_allowed_origins_call(strict):
    for origin, status in (("https://friend.example", 200), ("https://evil.example", 403)):
        answer = ask(strict, "/health", origin=origin, sec_fetch_site="cross-site", host="attention.example")
        assert answer.status == status
        assert ("access-control-allow-origin" in answer.headers) == (status == 200)
    preflight = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    problem(ask(strict, "/attention", "OPTIONS", **preflight), 403, "cross_site")


def test_pages_may_send_and_read_all_fields_that_the_server_knows(strict):
    """Without a preflight that allows them, fetch fails in the page. EventSource sends Last-Event-ID again."""
    asked = "traceparent,tracestate,baggage,last-event-id,x-timeout-ms,idempotency-key,authorization,content-type"
    origin = {"origin": "https://friend.example", "host": "attention.example"}
    for method in ("GET", "HEAD", "POST", "DELETE"):
        wanted = {"access_control_request_method": method, "access_control_request_headers": asked}
        assert ask(strict, "/benchmark", "OPTIONS", **origin, **wanted).status == 200
    shown = ask(strict, "/health", **origin).headers["access-control-expose-headers"].lower().split(", ")
    assert {"location", "retry-after", "x-request-id", "server-timing"} <= set(shown)
