"""The page and its files are served with a strict Content-Security-Policy, and with ETags for revalidation."""

import re

from tests.support.messages import ask


def test_it_is_served_with_a_strict_policy_and_asked_for_again_in_vain(server):
    page = ask(server, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    linked = re.findall(r'(?:href|src)="(static/[^"]+)"', text)
    assert len(linked) == 4
    for path in ("", *linked, "static/uPlot.esm.js"):
        answer = ask(server, f"/{path}")
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = ask(server, f"/{path}", if_none_match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")
    assert not re.search(r"<style|<script(?![^>]+src=)| style=| on[a-z]+=|https?://", text)
    missing = ask(server, "/static/nothing.js")
    assert (missing.status, missing.json["code"]) == (404, "not_found")
    assert ask(server, "/static/..%2fpage.py").status == 404
