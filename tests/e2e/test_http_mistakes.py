"""A mistake in a handwritten JSON request or in a call of the SDK causes an error that says what to do."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import torch

import flashpoint
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
    ({"window": 3}, "window: must be two integers [left, right], each -1 (no bound) or 0 to 2^30"),
    ({"scale": "big"}, "scale: must be a number"),
    ({"dropout_p": 1.5}, "dropout_p: must be less than 1"),
    ({"layout": "bhds"}, "layout: must be 'bhsd', 'bshd' or 'thd'"),
    ({"backend": "cuda"}, "backend: must be 'auto', 'triton', 'cpu'"),
    ({"dtype": "float23"}, "dtype: must be one of float16, bfloat16, float32, float64"),
    ({"k": [[1, 0, 0]]}, "k: head dimension 3 must be q's, 2"),
    ({"v": [[1, 2], [3, 4]]}, "v: heads and length (1, 2) must be k's, (1, 1)"),
    ({"q": [[1, 0], [1]]}, "q: is ragged: its lists at depth 2 differ in length"),
    ({"q": "zeros"}, "q: must be nested lists, or an object of shape and data"),
    ({"attn_mask": [[True, False]]}, "attn_mask: shape [1, 2] does not broadcast to [1, 1]"),
    ({"q": [[1, None]]}, "q: holds null"),
    (
        {"attn_mask": [[1]]},
        "attn_mask: holds only 0 and 1: write true and false to hide keys; numbers are added to scores",
    ),
    ({"causal": "top_left"}, "causal: must be true or false; causal_alignment takes top_left"),
    ({"k_scale": 0.5}, "k_scale: is for 8-bit k and v, but JSON has one dtype"),
]
REQUESTS = [
    ("GET", "/attention", "", {}, 405, "GET /attention is not served; send POST"),
    ("POST", "/atention", "{}", {}, 404, "there is no /atention: did you mean /attention? See /docs"),
    ("POST", "/attention/", "{}", {}, 404, "there is no /attention/: did you mean /attention? See /docs"),
    ("GET", "/healthz", "", {}, 404, "there is no /healthz: did you mean /health/live? See /docs"),
    ("GET", "/readyz", "", {}, 404, "there is no /readyz: did you mean /health/ready? See /docs"),
    ("GET", "/nowhere", "", {}, 404, "there is no /nowhere: see /docs"),
    ("POST", "/attention", "", {}, 400, "the body is not JSON: it is empty"),
    ("POST", "/attention", "{'q': 1}", {}, 400, "JSON"),
    ("POST", "/attention", '{"q": [[1, NaN]]}', {}, 400, 'NaN is not JSON: write "NaN" in fields'),
    ("POST", "/attention", "{}", {}, 422, "q: missing; k: missing; v: missing"),
    ("POST", "/attention", "[]", {}, 400, "object"),
    ("POST", "/attention", "q=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ("POST", "/caches", "{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "; send application/json"),
    ("POST", "/benchmark", "{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "; send application/json"),
    ("POST", "/caches", "{}", {"Content-Type": "application/vnd.safetensors"}, 415, "; send application/json"),
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
    """Return the detail of a problem document, and its errors as lines `field: message`."""
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


@pytest.mark.parametrize("path", ["/attention", "/attention/grad/", "/v2", "/health/ready"])
def test_an_address_that_names_a_call_is_not_the_servers_root(server, path):
    x = np.zeros((1, 4), np.float32)
    with flashpoint.Client(server.url + path) as client, pytest.raises(flashpoint.BadRequestError) as caught:
        client.attention(x, x, x)
    assert f"url must be the server's root, {server.url}, not {server.url}{path.rstrip('/')}" in str(caught.value)


def test_an_address_that_another_call_has_below_its_own_is_not_the_servers_root(server):
    x = np.zeros((1, 4), np.float32)
    for path, wrong in (
        ("/caches", lambda client: client.cache(layers=1)),  # POST /caches/caches
        ("/benchmark", lambda client: client.benchmark(shapes=[{"q_len": 1, "head_dim": 1}])),
        ("/saved", lambda client: client.attention(x, x, x)),
    ):
        with flashpoint.Client(server.url + path) as client, pytest.raises(flashpoint.BadRequestError) as caught:
            wrong(client)
        assert f"url must be the server's root, {server.url}, not {server.url}{path}" in str(caught.value)


def test_float64_beside_other_tensors_has_its_conversion():
    wide, x = np.zeros((1, 4)), np.zeros((1, 4), np.float32)
    half = torch.zeros(1, 4, dtype=torch.bfloat16)
    with flashpoint.Client("http://localhost:9") as client:  # nothing is sent
        for tensors, said in (
            ((wide, x, x), "k: dtype float32 must be q's, float64: send q.astype(np.float32); v: dtype float32"),
            ((x, wide, x), "k: dtype float64 must be q's, float32: send k.astype(np.float32)"),
            ((half, half, half.double()), "v: dtype float64 must be q's, bfloat16: send v in bfloat16"),
        ):
            with pytest.raises(flashpoint.InvalidInputError) as caught:
                client.attention(*tensors)
            assert str(caught.value).startswith(said)
            assert [field for field, _ in caught.value.errors] == (["k", "v"] if tensors[0] is wide else [said[0]])


def test_a_size_that_is_not_one_has_a_hint(server):
    with flashpoint.Client(server.url) as client:
        for call, field in (
            (lambda sizes: client.verify(shape=sizes), "shape"),
            (lambda sizes: client.benchmark(shapes=[sizes]), "shapes"),
        ):
            with pytest.raises(
                flashpoint.InvalidInputError, match=f"{field}.heads: unknown size; did you mean q_heads"
            ):
                call({"heads": 4, "q_len": 4, "head_dim": 8})
        with client.cache(layers=1, kv_heads=1, head_dim=4) as cache:
            x = np.zeros((1, 1, 1, 4), np.float32)
            with pytest.raises(
                flashpoint.InvalidInputError, match="layer: 3 does not exist: each cache has 1 layer, from 0"
            ):
                client.attention(x, x, x, caches=[cache.id], layer=3)


def test_a_closed_client_raises_an_error_of_the_tree(server):
    client = flashpoint.Client(server.url)
    run = client.benchmark(shapes=[{"q_len": 16, "head_dim": 16}], backends=["tiled"])
    client.close()
    calls = [client.info, client.ready, lambda: client.attention(*[np.zeros((1, 4), np.float32)] * 3), run.cancel]
    for call in (*calls, lambda: list(run.events())):
        with pytest.raises(flashpoint.FlashpointError, match="the client is closed: make a new one") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)

    async def twin():
        async with flashpoint.AsyncClient(server.url) as client:
            await client.info()
        with pytest.raises(flashpoint.ClosedError):
            await client.info()

    asyncio.run(twin())
