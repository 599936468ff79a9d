"""The documentation is served, and each of its examples is answered."""

import json

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
