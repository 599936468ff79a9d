"""Each HTTP status raises its class of exception, with the fields that the server names."""

import json

import pytest

import flashpoint
from tests.support.framed import Q


@pytest.mark.parametrize(
    ("status", "family"),
    [
        (400, flashpoint.BadRequestError), (401, flashpoint.AuthenticationError), (403, flashpoint.AuthenticationError),
        (404, flashpoint.BadRequestError), (406, flashpoint.BadRequestError), (408, flashpoint.BadRequestError),
        (413, flashpoint.TooLargeError), (415, flashpoint.BadRequestError), (422, flashpoint.InvalidInputError),
        (429, flashpoint.OverloadedError), (500, flashpoint.ServerError), (502, flashpoint.ServerError),
        (503, flashpoint.OverloadedError), (504, flashpoint.DeadlineExceededError), (302, flashpoint.ProtocolError),
    ],
)  # fmt: skip
def test_each_status_is_an_error_of_its_family(scripted, connect, status, family):
    scripted.script.append(lambda h: h.problem(status))
    with pytest.raises(family) as info:
        connect(scripted.url, retries=0).attention(Q, Q, Q)
    assert type(info.value) is family
    assert (info.value.status, info.value.request_id) == (status, "r1") or status == 302
    if status >= 400:
        assert str(info.value) == f"{status} some_code: some detail (request r1)"


def test_field_errors_are_read_and_an_error_page_is_no_surprise(scripted, connect):
    document = (
        b'{"detail": "not valid", "errors": [{"loc": ["q"], "msg": "too flat"}, {"loc": "k", "msg": "too long"}]}'
    )
    for body in (document, b"<html>Bad gateway", b"[" * 100_000, b""):
        scripted.script.append(lambda h, body=body: h.answer(422, body, "text/html", X_Request_Id="r2"))
    client = connect(scripted.url)
    with pytest.raises(ValueError, match="q: too flat") as info:
        client.attention(Q, Q, Q)
    assert info.value.errors == (("q", "too flat"), ("k", "too long"))
    for _ in range(3):
        with pytest.raises(flashpoint.InvalidInputError) as info:
            client.attention(Q, Q, Q)
        assert info.value.request_id == "r2"


@pytest.mark.parametrize(
    ("name", "message", "added"),
    [
        (
            "offset",
            "unknown option or tensor",
            "; this server is of an earlier version, which does not know offset: upgrade it",
        ),
        ("casual", "unknown option or tensor; did you mean causal?", ""),
        ("offset", "must be an integer", ""),
    ],
)
def test_an_option_of_this_version_that_the_server_does_not_know_names_the_upgrade(
    scripted, connect, name, message, added
):
    detail = f"{name}: {message}"
    document = json.dumps({"detail": detail, "errors": [{"loc": [name], "msg": message}]}).encode()
    scripted.script.append(lambda h: h.answer(422, document, "application/problem+json"))
    with pytest.raises(flashpoint.InvalidInputError) as info:
        connect(scripted.url).attention(Q, Q, Q)
    assert info.value.detail == detail + added
