"""The API documentation is served, and the server answers each of its examples."""

import json

import pytest

from tests.support.messages import JSON, ask, post


def test_the_documentation_is_served(server):
    assert b"/openapi.json" in ask(server, "/docs").body
    paths = ask(server, "/openapi.json").json["paths"]

    def example(path):
        return paths[path]["post"]["requestBody"]["content"][JSON]["examples"]["causal"]["value"]

    answer = post(server, "/attention", json.dumps(example("/attention")).encode(), JSON)
    assert answer.status == 200
    assert answer.json["o"][0] == [1.0, 2.0]  # the first query sees only the first key
    answer = post(server, "/attention/grad", json.dumps(example("/attention/grad")).encode(), JSON, x_priority=9)
    assert set(answer.json) == {"dq", "dk", "dv", "dtype", "backend", "kernel"}


@pytest.mark.parametrize(
    "path",
    [
        "/attention",
        "/attention/grad",
        "/verify",
        "/benchmark",
        *(f"/v2/models/{model}/infer" for model in ("attention", "attention_grad")),
    ],
)
def test_every_example_is_answered(server, path):
    """The server answers each example request of /openapi.json, which a reader of /docs can send with one click."""
    document = ask(server, "/openapi.json").json
    examples = document["paths"][path]["post"]["requestBody"]["content"][JSON]["examples"]
    assert examples
    for name, example in examples.items():
        answer = post(server, path, json.dumps(example["value"]).encode(), JSON)
        assert answer.status in (200, 202), (name, answer.body)
        if path == "/benchmark":
            ask(server, answer.headers["location"], "DELETE")
