"""Content-Type selects the format of a request (safetensors, JSON), and Accept that of its answer."""

import pytest

from flashpoint_server.formats.negotiation import answer_format, check_json, request_format
from flashpoint_server.refusal import Refusal
from tests.support.messages import post, problem, small

BINARY, JSON, OCTETS = "application/vnd.safetensors", "application/json", "application/octet-stream"


@pytest.mark.parametrize(
    ("given", "served"),
    [
        (BINARY, BINARY),
        (OCTETS, BINARY),
        ("Application/JSON; charset=utf-8", JSON),
        (f" {BINARY} ", BINARY),
    ],
)
def test_content_types_that_are_taken(given, served):
    assert request_format({"content-type": given}).media_type == served


@pytest.mark.parametrize("given", ["text/plain", BINARY, OCTETS, ""])
def test_a_call_that_takes_json_alone_names_no_other_type(given):
    with pytest.raises(Refusal) as caught:
        check_json({"content-type": given})
    assert caught.value.status == 415
    assert caught.value.detail == f"a body of type {given or 'unknown'} is not supported; send {JSON}"
    assert caught.value.headers["Accept-Post"] == JSON
    check_json({"content-type": f"{JSON}; charset=utf-8"})


@pytest.mark.parametrize(
    ("accept", "of_binary", "of_json"),
    [
        (None, BINARY, JSON),
        ("*/*", BINARY, JSON),
        ("application/*", BINARY, JSON),
        (JSON, JSON, JSON),
        (BINARY, BINARY, BINARY),
        (OCTETS, OCTETS, OCTETS),
        (f"{JSON};q=0.5, {BINARY}", BINARY, BINARY),
        (f"{JSON}, {BINARY};q=0.5", JSON, JSON),
        (f"*/*, {JSON};q=0", BINARY, BINARY),
        (f"*/*;q=0.1, {JSON};q=0.2", JSON, JSON),
        (f"application/*;q=0.3, */*;q=0.9, {BINARY};q=0", JSON, JSON),
        ("text/html, */*;q=0.1", BINARY, JSON),
        (f"{JSON.upper()} ; Q=1.0", JSON, JSON),
        (f"{BINARY};q=soon, {JSON};q=0.1", JSON, JSON),
        (f"{BINARY};q=nan, {JSON};q=0.1", JSON, JSON),
        ("", BINARY, JSON),
    ],
)
def test_the_answers_encoding(accept, of_binary, of_json):
    for content, expected in ((BINARY, of_binary), (JSON, of_json)):
        headers = {"content-type": content, **({} if accept is None else {"accept": accept})}
        assert answer_format(headers, request_format(headers)).media_type == expected


@pytest.mark.parametrize("accept", ["text/html", "*/*;q=0", "application/problem+json", f"{JSON};q=0"])
def test_what_cannot_be_given(accept):
    headers = {"content-type": BINARY, "accept": accept}
    with pytest.raises(Refusal) as caught:
        answer_format(headers, request_format(headers))
    assert caught.value.status == 406


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "image/*, text/plain;q=0.5", "*/*;q=0"])
def test_an_answer_that_cannot_be_given_406(server, accept):
    problem(post(server, "/attention", small(), accept=accept), 406, "not_acceptable")


@pytest.mark.parametrize("media", ["text/plain", "application/x-npy", "multipart/form-data; boundary=x", None])
def test_a_body_of_another_type_415(server, media):
    problem(post(server, "/attention", small(), media), 415, "unsupported_media_type")
    problem(post(server, "/attention", small(), content_encoding="gzip"), 415, "unsupported_media_type")
