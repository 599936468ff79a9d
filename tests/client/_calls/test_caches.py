"""The calls of a KV cache have the right paths, bodies and headers, and refuse answers that describe no cache."""

import json

import numpy as np
import pytest

import flashpoint
from flashpoint_contract.wire import decode_options, head_size, parse_head

CACHE = {"id": "c1", "layers": 2, "lengths": [3, 0], "bytes": 96}


def says(document, status=200, **headers):
    body = json.dumps(document).encode()
    return lambda handler: handler.answer(status, body, "application/json", **headers)


@pytest.fixture
def cache(scripted):
    scripted.script.append(says({"caches": [CACHE]}, 201, X_Flashpoint_Replica="r7"))
    with flashpoint.Client(scripted.url, retries=0) as client:
        yield client.cache(layers=2, kv_heads=np.int64(2), keep=[4, None], beside=None)
        scripted.script.clear()


def test_a_cache_is_made_with_its_sizes_and_later_calls_name_its_replica(scripted, cache):
    method, path, headers, body = scripted.requests[0]
    assert (method, path) == ("POST", "/caches")
    assert json.loads(body) == {"layers": 2, "kv_heads": 2, "keep": [4, None], "beside": None, "count": 1}
    assert headers["Idempotency-Key"]
    assert (cache.id, cache.length, cache.bytes, cache.replica) == ("c1", 3, 96, "r7")
    assert repr(cache) == "Cache('c1', layers=2, length=3)"
    scripted.script.append(says(CACHE | {"lengths": [9, 9]}))
    cache.refresh()
    assert cache.lengths == [9, 9]
    assert scripted.requests[-1][2]["X-Flashpoint-Replica"] == "r7"


def test_a_cache_beside_another_is_asked_for_at_the_replica_of_the_other(scripted, cache):
    scripted.script.append(says({"caches": [CACHE | {"id": "c2"}]}, 201))
    with flashpoint.Client(scripted.url, retries=0) as client:
        assert client.cache(layers=2, beside=cache).replica == "r7"
    _, path, headers, body = scripted.requests[-1]
    assert (path, headers["X-Flashpoint-Replica"], json.loads(body)["beside"]) == ("/caches", "r7", "c1")


def test_new_tokens_are_sent_as_a_message_and_the_length_is_taken(scripted, cache):
    scripted.script.append(says({"length": 5}))
    k, v = np.ones((2, 3, 4), np.float32), np.zeros((2, 3, 6), np.float32)
    assert cache.append(k, v, layer=1, at=2, layout="bshd") == 5
    assert cache.lengths == [3, 5]
    method, path, headers, body = scripted.requests[-1]
    head = parse_head(body[: head_size(body[:8])])
    assert (method, path, headers["Content-Type"]) == ("POST", "/caches/c1/append", "application/vnd.safetensors")
    assert [(t.name, t.shape) for t in head.tensors] == [("k", (2, 3, 4)), ("v", (2, 3, 6))]
    assert decode_options(head.metadata) == {"layer": 1, "layout": "bshd", "at": 2}
    assert body[head.size :] == k.tobytes() + v.tobytes()


def test_forks_and_deletions_name_their_caches(scripted, cache):
    scripted.script.append(says({"caches": [CACHE | {"id": "c2"}]}, 201))
    copy = cache.fork(2)
    assert (copy.id, copy.replica) == ("c2", "r7")
    assert json.loads(scripted.requests[-1][3]) == {"caches": ["c1"], "lengths": [2], "free": []}
    scripted.script.append(lambda handler: handler.answer(204, media=""))
    with flashpoint.Client(scripted.url) as client:
        client.delete_caches([cache, copy])
    assert json.loads(scripted.requests[-1][3]) == {"caches": ["c1", "c2"]}
    scripted.script.append(lambda handler: handler.problem(404, "cache_lost"))
    copy.delete()  # the cache is gone already, and no error is raised
    assert scripted.requests[-1][:2] == ("DELETE", "/caches/c2")


@pytest.mark.parametrize("document", [{}, {"caches": []}, {"caches": [{"id": "c"}]}, {"caches": ["c"]}])
def test_an_answer_that_describes_no_cache_is_a_protocol_error(scripted, connect, document):
    scripted.script.append(says(document, 201))
    with pytest.raises(flashpoint.ProtocolError, match="the answer describes no cache"):
        connect(scripted.url, retries=0).cache()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kvheads": 1}, "kvheads: is not an option of a cache; did you mean kv_heads"),
        ({"ttl_s": float("nan")}, "ttl_s: must be text, finite numbers or lists of them"),
        ({"dtype": object}, "dtype: must be text"),
    ],
)
def test_a_wrong_size_is_refused_before_anything_is_sent(scripted, connect, keywords, message):
    with pytest.raises(flashpoint.InvalidInputError, match=message):
        connect(scripted.url).cache(**keywords)
    assert scripted.requests == []
