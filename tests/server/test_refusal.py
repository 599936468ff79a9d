"""A `Refusal` has a complete problem document, in which names and values of the caller are shortened."""

import json

from flashpoint_server.refusal import LONGEST_MESSAGE, LONGEST_NAME, STATUS, Refusal, invalid
from tests.support.messages import JSON, ask, message, normal, problem
from tests.support.messages import post as post_to


def test_an_error_repeats_names_and_values_in_part():
    long, spaced = "x" * 70_000, "x " * 35_000
    for text in (long, spaced):
        refusal = invalid([(text, f"{text!r} is not known")])
        ((field, message),) = refusal.errors
        assert len(field) <= LONGEST_NAME
        assert len(message) <= LONGEST_MESSAGE
        assert message.endswith("is not known")
        assert len(Refusal("not_found", f"there is no /{text}").detail) <= LONGEST_MESSAGE
    short = f"there is no {'x' * 150} and no {'y' * 150}"
    assert Refusal("not_found", short).detail == short


def test_a_problem_document_is_complete_for_every_code():
    for code, status in STATUS.items():
        document = Refusal(code, "because").document("an-id")
        assert (document["status"], document["code"], document["request_id"]) == (status, code, "an-id")
        assert document["title"]
        assert ("Retry-After" in Refusal(code, "because").headers) == (status in (429, 503))


def test_long_names_are_shortened_in_errors(server):
    long = "x" * 3000
    tensors = {name: normal(2, 3) for name in "qkv"}
    for body, where in ((message(tensors | {long: normal(1)}), long), (message(tensors, **{long: 1}), long),
                        (message(tensors, layout=long), "layout")):  # fmt: skip
        answer = post_to(server, "/attention", body)
        document = problem(answer, 422, "invalid_request")
        ((field, *_),) = (error["loc"] for error in document["errors"])
        assert field[:60] == where[:60]
        assert len(field) <= 200
        assert len(answer.body) < 1500
    problem(missing := ask(server, f"/{long}"), 404, "not_found")
    assert len(missing.body) < 1000
    inputs = [{"name": long, "shape": [1], "datatype": "FP32", "data": [1]}]
    refused = post_to(server, "/v2/models/attention/infer", json.dumps({"inputs": inputs}).encode(), JSON)
    assert refused.status == 422
    assert len(refused.body) < 1000
    refused = ask(server, f"/v2/models/{long}")
    assert (refused.status, len(refused.body) < 1000) == (404, True)
