"""An invalid request gets the error document that /openapi.json shows as an example for it."""

import pytest

from tests.support.messages import JSON, ask, post

WRONG = {  # name: (code of the error, method, path, body, headers) of a request that gets the example error
    "an option": ("invalid_request", "POST", "/attention", b'{"q":[[1]],"k":[[1]],"v":[[1]],"casual":true}', {}),
    "a tensor": ("invalid_request", "POST", "/attention/grad", b'{"q":[[1]],"k":[[1]],"v":[[1]],"dout":[[1]]}', {}),
    "a shape": ("invalid_request", "POST", "/verify", b'{"shape":{"q_len":64}}', {}),
    "a preset": ("invalid_request", "POST", "/benchmark", b'{"preset":"paper"}', {}),
    "a list": ("invalid_request", "POST", "/caches", b'{"layers":4,"kv_heads":[1,2]}', {}),
    "no ids": ("invalid_request", "POST", "/caches/delete", b"{}", {}),
    "an event": ("invalid_request", "GET", "/benchmark/{id}/events", None, {"last_event_id": "first"}),
    "a plot": ("invalid_request", "GET", "/benchmark/{id}/plot.{format}?kind=pie", None, {}),
    "a deadline": ("invalid_request", "GET", "/caches", None, {"x_timeout_ms": "soon"}),
    "half a body": ("malformed_body", "POST", "/attention", b'{"q":[[1,0]]', {}),
    "an answer": ("not_acceptable", "POST", "/attention", b"{}", {"accept": "text/html"}),
    "a type": ("unsupported_media_type", "POST", "/attention", b"{}", {"content_type": "text/plain"}),
    "a type of caches": ("unsupported_media_type", "POST", "/caches", b"{}", {"content_type": "text/plain"}),
    "a type of forks": ("unsupported_media_type", "POST", "/caches/fork", b"{}", {"content_type": "text/plain"}),
    "a type of benchmarks": ("unsupported_media_type", "POST", "/benchmark", b"{}", {"content_type": "text/plain"}),
    "a benchmark": ("not_found", "GET", "/benchmark/{id}", None, {}),
    "a cache": ("cache_not_found", "GET", "/caches/{id}", None, {}),
    "a forward": ("saved_not_found", "DELETE", "/saved/{id}", None, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_answered_as_its_example(server, name):
    code, method, path, body, fields = WRONG[name]
    operation = ask(server, "/openapi.json").json["paths"][path.partition("?")[0]][method.lower()]
    contents = [response.get("content", {}) for response in operation["responses"].values()]
    problems = [content["application/problem+json"] for content in contents if "application/problem+json" in content]
    examples = {each: example["value"] for one in problems for each, example in one["examples"].items()}
    address = path.replace("{id}", "none").replace("{format}", "svg")
    rest = {field: text for field, text in fields.items() if field != "content_type"}
    media = fields.get("content_type", JSON)
    answer = ask(server, address, method, **rest) if body is None else post(server, address, body, media, **rest)
    assert answer.json | {"request_id": ""} == examples[code] | {"request_id": ""}
    assert answer.status == examples[code]["status"]
