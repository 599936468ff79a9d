"""Each error code has an entry on the page /docs/errors, to which the `type` of a problem document points."""

import re

from flashpoint_server.page.errors import ERRORS
from flashpoint_server.refusal import STATUS
from tests.support.messages import ask


def test_every_error_has_its_line_under_the_type_of_its_problem(server):
    refused = ask(server, "/nowhere").json
    page, _, anchor = refused["type"].partition("#")
    answer = ask(server, page)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert ERRORS.keys() == STATUS.keys()
    text = answer.body.decode()
    assert f'<section id="{anchor}">' in text
    assert re.findall(r'<section id="([^"]+)">', text) == list(STATUS)
    assert not re.search(r"https?://", text)
