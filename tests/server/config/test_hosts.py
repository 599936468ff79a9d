"""`host_name` returns the name in a Host header, or None if it is invalid; `allowed_hosts` accepts only host names."""

import pytest
from pydantic import ValidationError

from flashpoint_server.config.hosts import host_name
from flashpoint_server.config.settings import Settings


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"), ("LocalHost:8000", "localhost"), ("a.example.", "a.example"), ("a_b:", "a_b"),
        ("127.0.0.1:65535", "127.0.0.1"), ("[::1]:80", "[::1]"), ("[0:0::1]", "[::1]"), ("%41.b", "%41.b"),
        ("", None), (":80", None), ("a b", None), ("a:b", None), ("a:65536", None), ("a:١", None), ("a:1:2", None),
        ("user@a", None), ("a/b", None), ("a?b", None), ("[::1", None), ("[::g]", None), ("::1", None), ("ä", None),
        ("a,b c", None), ("%4", None), (".", None), ("a\x00", None), ("a" * 301, None),
    ],
)  # fmt: skip
def test_the_name_of_a_host_field(host, name):
    assert host_name(host) == name


@pytest.mark.parametrize("hosts", ["a:80", "a b", "http://a", "*a", "a.*", "**", "*.*.a", "[::1"])
def test_a_setting_that_names_no_host_is_refused(hosts):
    with pytest.raises(ValidationError, match="give a host name"):
        Settings(allowed_hosts=hosts)
