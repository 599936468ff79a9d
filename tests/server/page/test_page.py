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


def test_a_copy_is_current_for_any_form_of_its_tag(server):
    """If-None-Match is a list of tags, weak or not, or `*` (RFC 9110, §13.1.2)."""
    tag = ask(server, "/").headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', f'W/"other",W/{tag}', "*", f'"a,b" ,\t{tag}'):
        for method in ("GET", "HEAD"):
            answer = ask(server, "/", method, if_none_match=given)
            assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", tag), given
    for given in ('"other"', 'W/"other"', tag[:-2] + '"', tag.strip('"'), "", f'"{tag[1:-1]}', '"*"'):
        assert ask(server, "/", if_none_match=given).status == 200, given
