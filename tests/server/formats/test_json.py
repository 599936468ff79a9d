"""Malformed JSON gets 400. JSON with an invalid field gets 422, and the error names the field."""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import JSON, post, problem, small

GOOD = small()


MALFORMED_JSON = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[1]",
    "NaN literal": b'{"q": [[NaN]], "k": [[1]], "v": [[1]]}',
    "a key twice": b'{"q": [[1]], "q": [[1]], "k": [[1]], "v": [[1]]}',
    "deep": b'{"q": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "not UTF-8": b'{"q": "\xff"}',
}


@pytest.mark.parametrize("name", MALFORMED_JSON)
def test_malformed_json_is_400_and_the_server_goes_on(server, name):
    problem(post(server, "/attention", MALFORMED_JSON[name], JSON), 400, "malformed_body")
    assert post(server, "/attention", GOOD).status == 200


INVALID_JSON = {
    "ragged": ({"q": [[1, 2], [3]]}, "q"),
    "words": ({"q": [["one", 2]]}, "q"),
    "too large for its dtype": ({"q": [[1e39, 2]]}, "q"),
    "dtype": ({"dtype": "float8"}, "dtype"),
    "flat data of another size": ({"q": {"shape": [2, 2], "data": [1]}}, "q"),
    "unknown": ({"mask": [1]}, "mask"),
    "sizes that Python does not spell": ({"q": {"shape": [10**4000 - 1, 10**4000 - 1], "data": []}}, "q"),
    "lists within lists": ({"window": json.loads("[" * 900 + "]" * 900)}, "window"),
    "no name": ({"": 1}, "request"),
}


@pytest.mark.parametrize("name", INVALID_JSON)
def test_invalid_json_fields_are_422(server, name):
    changes, field = INVALID_JSON[name]
    good = {"q": [[1, 2]], "k": [[1, 2]], "v": [[1, 2]]}
    document = problem(
        post(server, "/attention", json.dumps({**good, **changes}).encode(), JSON), 422, "invalid_request"
    )
    assert [error["loc"] for error in document["errors"]] == [[field]]
