"""NO_PROXY names servers that are reached without a proxy: an API key must not pass through one."""

import httpx
import numpy as np
import pytest

from flashpoint._http.proxies import of_environment
from tests.support.framed import Q
from tests.support.proxies import ProxyServer

# The table of curl's tests/unit/unit1614.c.
OF_CURL = [
    ("www.example.com", "localhost .example.com .example.de", True),
    ("www.example.com", "localhost,.example.com,.example.de", True),
    ("www.example.com.", "localhost,.example.com,.example.de", True),
    ("example.com", "localhost,.example.com,.example.de", True),
    ("example.com.", "localhost,.example.com,.example.de", True),
    ("www.example.com", "localhost,.example.com.,.example.de", True),
    ("www.example.com", "localhost,www.example.com.,.example.de", True),
    ("example.com", "localhost,example.com,.example.de", True),
    ("example.com.", "localhost,example.com,.example.de", True),
    ("nexample.com", "localhost,example.com,.example.de", False),
    ("www.example.com", "localhost,example.com,.example.de", True),
    ("127.0.0.1", "127.0.0.1,localhost,", True),
    ("127.0.0.1", "127.0.0.1/8,localhost,", True),
    ("127.0.0.1", "127.0.0.1/28,localhost,", True),
    ("127.0.0.1", "127.0.0.1/31,localhost,", True),
    ("127.0.0.1", "localhost,127.0.0.1", True),
    ("127.0.0.1", "localhost," + "127.0.0.1." * 12 + "127.0.0.", False),
    ("127.0.0.1", "localhost," + "127.0.0.1." * 12 + "127.0.0", False),
    ("localhost", "localhost,127.0.0.1", True),
    ("localhost", "127.0.0.1,localhost", True),
    ("foobar", "barfoo", False),
    ("foobar", "foobar", True),
    ("192.168.0.1", "foobar", False),
    ("192.168.0.1", "192.168.0.0/16", True),
    ("192.168.0.1", "192.168.0.0/24", True),
    ("192.168.0.1", "192.168.0.0/32", False),
    ("192.168.0.1", "192.168.0.0", False),
    ("192.168.1.1", "192.168.0.0/24", False),
    ("192.168.1.1", "foo, bar, 192.168.0.0/24", False),
    ("192.168.1.1", "foo, bar, 192.168.0.0/16", True),
    ("[::1]", "foo, bar, 192.168.0.0/16", False),
    ("[::1]", "foo, bar, ::1/64", True),
    ("bar", "foo, bar, ::1/64", True),
    ("BAr", "foo, bar, ::1/64", True),
    ("BAr", "foo,,,,,              bar, ::1/64", True),
    ("www.example.com", "foo, .example.com", True),
    ("www.example.com", "www2.example.com, .example.net", False),
    ("example.com", ".example.com, .example.net", True),
    ("nonexample.com", ".example.com, .example.net", False),
    ("192.160.0.1", "192.160.0.1/33", False),
    ("192.160.0.1", "10.0.0.1/8", False),
    ("[::1]", "0:0::1/128", True),
    ("[::1]", "0:0::1/129", False),
    ("[fe80::ab47:4396:55c9:8474]", "fe80::ab47:4396:55c9:8474/64", True),
]
OTHERS = [
    ("foobar", "*", True),
    ("[::1]", " * ", True),
    ("foobar", "", False),
    ("foobar", ".", False),
    ("[::1]", "::1", True),
    ("[::1]", "[::1]", True),
    ("[0:0:0::1]", "::1", True),
    ("[fd00:1::7]", "fd00::/8", True),
    ("[fd00:1::7]", "fd00::/17", True),
    ("[fe00:1::7]", "fd00::/8", False),
    ("[fe80::2:1]", "fe80::2:1", True),
    ("[fe80::1%25eth0]", "fe80::1", True),
    ("[::ffff:10.1.2.3]", "10.0.0.0/8", True),
    ("10.1.2.3", "0.0.0.0/0", True),
    ("10.1.2.3", "::/0", False),
    ("10.1.2.3", "10/x, 10.0.0.0/-1, /, [, ]", False),
    ("127.1", "127.0.0.1", True),
    ("127.1", "127.1", True),
    ("0x7f000001", "127.0.0.0/8", True),
    ("2130706433", "127.0.0.1", True),
    ("127.0.0.1.", "127.0.0.1", True),
    ("bücher.example", "bücher.example", True),
    ("www.bücher.example", "BÜCHER.example.", True),
    ("bücher.example", "xn--bcher-kva.example", True),
    ("xn--bcher-kva.example", "bücher.example", True),
    ("foobar:7", "foobar:7", True),
    ("foobar:7", "foobar:8", False),
    ("foobar", "foobar:80", True),
    ("www.foobar", ".foobar:80", True),
    ("[::1]:7", "[::1]:7", True),
    ("[::1]:7", "[::1]:8", False),
    ("10.1.2.3:7", "10.1.2.3:7", True),
    ("10.1.2.3:7", "10.1.2.3:8", False),
]


@pytest.mark.parametrize(("host", "no_proxy", "direct"), OF_CURL + OTHERS)
def test_the_entries_of_no_proxy_are_read_as_curl_does(monkeypatch, host, no_proxy, direct):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (of_environment(httpx.URL(f"http://{host}/")) is None) == direct


@pytest.mark.parametrize(("lower", "upper", "direct"), [("a", "b", True), ("b", "a", False), ("", "a", True)])
def test_no_proxy_in_lower_case_counts_first_unless_it_is_empty(monkeypatch, lower, upper, direct):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", lower)
    monkeypatch.setenv("NO_PROXY", upper)
    assert (of_environment(httpx.URL("http://a/")) is None) == direct


@pytest.mark.parametrize(("host", "no_proxy"), [("127.0.0.1", "127.0.0.0/8"), ("127.1", "127.0.0.1")])
def test_no_call_goes_to_the_proxy_for_a_server_that_is_excepted(scripted, connect, monkeypatch, host, no_proxy):
    with ProxyServer("http") as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", no_proxy)
        url = scripted.url.replace("127.0.0.1", host)
        assert np.array_equal(connect(url, api_key="secret").attention(Q, Q, Q), Q)
        assert not proxy.asked
