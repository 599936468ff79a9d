"""Mistakes in handwritten JSON are refused with the right status and a message that says what to do."""

import json

import httpx
import pytest

from tests.support.messages import PATIENCE

GOOD = {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}
FIELDS = [
    ({"casual": True}, "casual: unknown option or tensor; did you mean causal?"),
    ({"is_causal": True}, "is_causal: unknown option or tensor; did you mean causal?"),
    ({"softmax_scale": 1}, "softmax_scale: unknown option or tensor; did you mean scale?"),
    ({"query": [[1, 0]]}, "query: unknown option or tensor; did you mean q?"),
    ({"mask": [[True]]}, "mask: unknown option or tensor; did you mean attn_mask?"),
    ({"causal": 1}, "causal: must be true or false"),
    ({"causal": "true"}, "causal: must be true or false"),
    ({"window": 3}, "window: must be a list"),
    ({"scale": "big"}, "scale: must be a number"),
    ({"dropout_p": 1.5}, "dropout_p: must be less than 1"),
    ({"layout": "bhds"}, "layout: must be 'bhsd', 'bshd' or 'thd'"),
    ({"backend": "cuda"}, "backend: must be 'auto', 'triton', 'torch'"),
    ({"dtype": "float23"}, "dtype: must be one of float16, bfloat16, float32, float64"),
    ({"k": [[1, 0, 0]]}, "k: head dimension 3 must be q's, 2"),
    ({"v": [[1, 2], [3, 4]]}, "v: heads and length (1, 2) must be k's, (1, 1)"),
    ({"q": [[1, 0], [1]]}, "q: is ragged: its lists at depth 2 differ in length"),
    ({"q": "zeros"}, "q: must be nested lists, or an object of shape and data"),
    ({"attn_mask": [[True, False]]}, "attn_mask: shape [1, 2] does not broadcast to [1, 1]"),
    ({"k_scale": 0.5}, "k_scale: is for 8-bit k and v, but JSON has one dtype"),
]
REQUESTS = [
    ("GET", "/attention", "", {}, 405, "GET /attention is not served; send POST"),
    ("POST", "/atention", "{}", {}, 404, "there is no /atention: see /docs"),
    ("POST", "/attention", "", {}, 400, "the body is not JSON: it is empty"),
    ("POST", "/attention", "{'q': 1}", {}, 400, "JSON"),
    ("POST", "/attention", "{}", {}, 422, "q: missing; k: missing; v: missing"),
    ("POST", "/attention", "[]", {}, 400, "object"),
    ("POST", "/attention", "q=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ("POST", "/attention", json.dumps(GOOD), {"Accept": "text/html"}, 406, "application/json"),
    ("POST", "/attention", json.dumps(GOOD), {"X-Timeout-Ms": "soon"}, 422, "X-Timeout-Ms"),
    ("POST", "/attention/grad", json.dumps(GOOD), {}, 422, "do: "),
    ("POST", "/caches", '{"kv_heads": 0}', {}, 422, "kv_heads: must be greater than or equal to 1\nkv"),
    (
        "POST",
        "/caches",
        '{"head_dim": [64, 0]}',
        {},
        422,
        "head_dim: must be greater than or equal to 1\nhe",
    ),
    ("POST", "/caches", '{"value_dim": "64"}', {}, 422, "must be an integer; value_dim: must be a list"),
    ("GET", "/caches/none", "", {}, 404, "this cache does not exist, or belongs to another API key"),
    ("GET", "/benchmark/none", "", {}, 404, "the benchmark does not exist, or is no longer stored"),
]


def text(answer):
    """Return the detail of a problem, and its errors as `field: message`."""
    document = answer.json()
    assert document["detail"]
    return "\n".join([document["detail"], *(f"{e['loc'][-1]}: {e['msg']}" for e in document.get("errors") or ())])


@pytest.mark.parametrize(("changes", "message"), FIELDS, ids=[str(changes) for changes, _ in FIELDS])
def test_a_wrong_field_is_named_with_what_is_allowed(server, changes, message):
    answer = httpx.post(f"{server.url}/attention", json=GOOD | changes, timeout=PATIENCE)
    assert answer.status_code == 422
    assert message in text(answer)


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "message"), REQUESTS)
def test_a_wrong_request_says_what_is_taken(server, method, path, body, headers, status, message):
    headers = {"Content-Type": "application/json"} | headers
    answer = httpx.request(method, f"{server.url}{path}", content=body, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, message in text(answer)) == (status, True), text(answer)
