"""With /caches, an API key creates, forks, lists, reads and deletes only its own caches, within limits."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.caches import (
    HK,
    HQ,
    KEYS,
    LAYERS,
    SHAPE,
    D,
    appended,
    attended,
    bearer,
    created,
    kv,
    lengths,
    posted,
    started,
    write_keys,
)
from tests.support.messages import JSON, ask, message, normal, post, problem, read_metrics
from tests.support.servers import wait_for


@pytest.fixture(scope="module")
def hurt(start_server, tmp_path_factory):
    """Start a server for the tests that kill its engine or change its API keys."""
    return started(start_server, tmp_path_factory)


def test_an_exported_layer_says_which_of_its_tokens_are_left(cache_server):
    (one,), k, v = created(cache_server, keep=[100, None]), *kv(1135, 3)
    for some in (slice(0, 1130), slice(1130, 1135)):
        for layer in range(LAYERS):
            assert appended(cache_server, one, k[:, :, some], v[:, :, some], layer=layer).status == 200
    for layer, first in enumerate((1024, 0)):
        answer = ask(cache_server, f"/caches/{one}/tensors?layer={layer}", **bearer("alice"))
        assert answer.metadata == {"first": str(first), "length": "1135"}
        assert torch.equal(answer.tensors["k"], k[:, :, first:])
        assert torch.equal(answer.tensors["v"], v[:, :, first:])
    posted(cache_server, "/caches/delete", {"caches": [one]})


def test_ids_of_others_and_guessed_ones_are_not_found(cache_server):
    (one,) = created(cache_server)
    other = one[:-3] + ("AAA" if one[-3:] != "AAA" else "BBB")
    for name, guess in (("bob", one), ("alice", other), ("alice", "c"), ("alice", "x" * 5000), ("alice", one + "A")):
        actual = [
            ask(cache_server, f"/caches/{guess}", **bearer(name)),
            ask(cache_server, f"/caches/{guess}", "DELETE", **bearer(name)),
            posted(cache_server, f"/caches/{guess}/truncate", {"length": 0}, name),
            posted(cache_server, f"/caches/{guess}/renew", {}, name),
            posted(cache_server, "/caches/fork", {"caches": [guess]}, name),
            posted(cache_server, "/caches", {**SHAPE, "beside": guess}, name),
            attended(cache_server, {"q": normal(1, HQ, 1, D)}, name, caches=[guess]),
            ask(cache_server, f"/caches/{guess}/tensors", **bearer(name)),
        ]  # fmt: skip
        assert [(answer.status, answer.json["code"]) for answer in actual] == [(404, "cache_not_found")] * len(actual)
    assert ask(cache_server, "/caches", **bearer("bob")).json == {"caches": []}
    assert ask(cache_server, f"/caches/{one}", **bearer("alice")).status == 200
    posted(cache_server, "/caches/delete", {"caches": [one]})


def test_a_key_is_held_to_its_quota_and_all_keys_to_the_memory(cache_server):
    (one,) = created(cache_server, "carol")
    k, v = kv(8000, 13)
    problem(post(cache_server, f"/caches/{one}/append", message({"k": k, "v": v}), **bearer("carol")), 429, "key_limit")
    (two,) = created(cache_server)
    problem(
        post(
            cache_server,
            f"/caches/{two}/append",
            message({"k": k.repeat(1, 1, 5, 1), "v": v.repeat(1, 1, 5, 1)}),
            **bearer("alice"),
        ),
        413,
        "work_too_large",
    )
    assert post(cache_server, f"/caches/{two}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    filled, answer = [], None
    for _ in range(9):
        answer = posted(cache_server, "/caches", {**SHAPE, "layers": 1, "max_length": 8000})
        filled += [cache["id"] for cache in answer.json.get("caches", [])]
    problem(answer, 429, "cache_memory")
    posted(cache_server, "/caches/delete", {"caches": [two, *filled]})
    posted(cache_server, "/caches/delete", {"caches": [one]}, "carol")
    info = ask(cache_server, "/info", **bearer("alice")).json["caches"]
    assert info["limit_bytes"] == 8 << 20


@pytest.mark.slow
def test_tensors_are_read_as_one_request(start_server, tmp_path):
    """Reading all tensors of a cache counts as one request, and their bytes count for the API key's bytes_per_second.

    The server allows only one request at a time, so the read fails if it counts as more.
    """
    limits = {"rights": ["attention"], "concurrent": 1, "bytes_per_second": 200_000}
    digest = hashlib.sha256(KEYS["alice"].encode()).hexdigest()
    file = tmp_path / "keys.toml"
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in {"sha256": digest, **limits}.items())
    file.write_text("[alice]\n" + "".join(lines))
    server = start_server(queue_limit=1, api_keys_file=file)
    (one,), (k, v) = created(server), kv(1000, 0)
    assert post(server, f"/caches/{one}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    answers = []

    def read():
        answers.append(ask(server, f"/caches/{one}/tensors", **bearer("alice")))
        return answers[-1].status == 200

    wait_for(read, lambda: answers[-1], seconds=10)  # after the append, the rate limit must recover
    assert "bytes a second" in problem(ask(server, f"/caches/{one}", **bearer("alice")), 429, "key_limit")["detail"]


@pytest.mark.slow
def test_a_server_without_memory_has_no_caches_and_saves_nothing(start_server):
    server = start_server(cache_bytes=0)
    problem(post(server, "/caches", json.dumps(SHAPE).encode(), JSON), 404, "not_found")
    q, (k, v) = normal(1, HQ, 9, D), kv(9, 0)
    problem(post(server, "/attention", message({"q": q, "k": k, "v": v}, save=True)), 413, "work_too_large")
    problem(ask(server, "/saved"), 404, "not_found")


def test_removing_a_key_frees_its_caches(hurt):
    created(hurt, "bob", max_length=1024)

    def held_bytes():
        return ask(hurt, "/info", **bearer("alice")).json["caches"]["bytes"]

    wait_for(lambda: held_bytes() > 0, lambda: "nobody is told of the cache")
    write_keys(hurt.keys_file, ["alice", "carol"])
    wait_for(lambda: held_bytes() == 0, lambda: "the cache is still held", seconds=60)
    write_keys(hurt.keys_file, KEYS)
    wait_for(lambda: ask(hurt, "/caches", **bearer("bob")).status == 200, lambda: "the key is not back")


def test_a_cache_of_an_engine_that_died_is_lost_and_one_of_no_engine_never_was(hurt):
    (one,) = created(hurt)
    (pid,) = hurt.children("engine.process")
    os.kill(pid, signal.SIGKILL)

    def lost():
        answers = [ask(hurt, f"/caches/{one}", **bearer("alice")) for _ in range(6)]  # from both HTTP processes
        with contextlib.suppress(KeyError):
            return all(answer.json["code"] == "cache_lost" for answer in answers)

    wait_for(lost, lambda: "the cache is not lost")
    problem(ask(hurt, f"/caches/{one}", **bearer("alice")), 410, "cache_lost")
    wait_for(lambda: ask(hurt, "/health/ready").status == 200, lambda: "not ready again")
    problem(attended(hurt, {"q": normal(1, HQ, 1, D)}, caches=[one]), 410, "cache_lost")
    problem(ask(hurt, f"/caches/{one}", **bearer("bob")), 404, "cache_not_found")


def held(server):
    """Return the metrics of what engines hold."""
    text = ask(server, "/metrics", **bearer("alice")).body.decode()
    names = "caches|cache_bytes|saved_forwards|saved_bytes"
    return {name: float(n) for name, n in re.findall(rf"^flashpoint_({names})\{{.*\}} (\S+)$", text, re.MULTILINE)}


def test_the_metrics_of_caches_and_saved_forwards_tell_what_is_held(cache_server):
    def agree():
        shown = held(cache_server)
        return all(
            shown[metric] == sum(len(ask(cache_server, f"/{what}", **bearer(name)).json[what]) for name in KEYS)
            for metric, what in (("caches", "caches"), ("saved_forwards", "saved"))
        )

    two = [*created(cache_server, max_length=100), *created(cache_server)]
    k, v = kv(6, 0)
    saved = attended(cache_server, {"q": normal(1, HQ, 6, D), "k": k, "v": v}, save=True).metadata["saved"]
    wait_for(agree, lambda: held(cache_server), seconds=60)
    assert held(cache_server)["cache_bytes"] >= 100 * LAYERS * HK * 2 * D * 4
    assert held(cache_server)["saved_bytes"] >= 2 * 4 * (6 * HQ + 6 * HK) * D
    posted(cache_server, "/caches/delete", {"caches": two})
    assert ask(cache_server, f"/saved/{saved}", "DELETE", **bearer("alice")).status == 204
    wait_for(agree, lambda: held(cache_server), seconds=60)


def test_errors_name_the_field_of_an_id(cache_server):
    (one,) = created(cache_server, layers=1)
    for path, document, field in (
        ("/caches/fork", {"caches": [one], "free": ["nobody"]}, "free.0"),
        ("/caches", {**SHAPE, "beside": "nobody"}, "beside"),
    ):
        answer = post(cache_server, path, json.dumps(document).encode(), JSON, **bearer("alice"))
        assert [error["loc"] for error in problem(answer, 404, "cache_not_found")["errors"]] == [[field]], path
    posted(cache_server, "/caches/delete", {"caches": [one]})


@pytest.mark.slow
def test_an_id_of_another_key_is_not_found_wherever_it_stands_and_nothing_else_happens(cache_server):
    (mine,), (yours,) = created(cache_server, "bob"), created(cache_server, "alice")
    k, v = kv(2, 1)
    appended(cache_server, yours, k, v)
    two = {name: t.repeat(2, 1, 1, 1) for name, t in {"q": normal(1, HQ, 2, D), "k": k, "v": v}.items()}
    answers = [
        appended(cache_server, yours, k, v, "bob"),
        attended(cache_server, two, "bob", caches=[mine, yours]),
        attended(cache_server, two, "bob", caches=[yours, mine]),
        attended(cache_server, {"q": two["q"]}, "bob", caches=[mine, yours]),
        posted(cache_server, "/caches/fork", {"caches": [mine, yours]}, "bob"),
        posted(cache_server, "/caches/fork", {"caches": [mine], "free": [yours]}, "bob"),
        posted(cache_server, "/caches/delete", {"caches": [mine, yours]}, "bob"),
        posted(cache_server, f"/caches/{yours}/truncate", {"length": 0}, "bob"),
        posted(cache_server, f"/caches/{yours}/renew", {}, "bob"),
        posted(cache_server, "/caches", {**SHAPE, "beside": yours}, "bob"),
        ask(cache_server, f"/caches/{yours}", "DELETE", **bearer("bob")),
        ask(cache_server, f"/caches/{yours}/tensors?layer=0", **bearer("bob")),
    ]  # fmt: skip
    assert [(answer.status, answer.json["code"]) for answer in answers] == [(404, "cache_not_found")] * len(answers)
    assert lengths(cache_server, mine, "bob") == [0, 0]
    assert lengths(cache_server, yours) == [2, 0]
    assert [cache["id"] for cache in ask(cache_server, "/caches", **bearer("bob")).json["caches"]] == [mine]
    posted(cache_server, "/caches/delete", {"caches": [mine]}, "bob")
    posted(cache_server, "/caches/delete", {"caches": [yours]})


@pytest.mark.slow
def test_a_key_that_uses_up_its_quota_is_refused_alone(cache_server):
    filled = []
    answer = None
    while answer is None or answer.status == 201:
        answer = posted(cache_server, "/caches", {**SHAPE, "layers": 1, "max_length": 1024}, "carol")
        filled += [cache["id"] for cache in answer.json.get("caches", [])]
    problem(answer, 429, "key_limit")
    assert appended(cache_server, filled[0], *kv(1000, 1), "carol").status == 200
    # For the quota, a fork counts all bytes of its tokens, although it shares their memory with its source.
    problem(posted(cache_server, "/caches/fork", {"caches": filled[:1]}, "carol"), 429, "key_limit")
    for name in ("alice", "bob"):
        (one,) = created(cache_server, name, max_length=1024)
        assert appended(cache_server, one, *kv(5, 1), name).status == 200
        posted(cache_server, "/caches/delete", {"caches": [one]}, name)
    posted(cache_server, "/caches/delete", {"caches": filled}, "carol")
    assert created(cache_server, "carol")
    listed = [cache["id"] for cache in ask(cache_server, "/caches", **bearer("carol")).json["caches"]]
    posted(cache_server, "/caches/delete", {"caches": listed}, "carol")


@pytest.mark.slow
def test_a_creation_that_its_engine_had_not_begun_may_be_sent_again(start_server):
    """If an engine dies before it starts POST /caches or GET /caches, the answer is 503, and not 410 `cache_lost`.

    So the client may send the request again.
    """
    server = start_server()
    os.kill(server.engine_pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        requests = [
            pool.submit(post, server, "/caches", b"{}", JSON), pool.submit(ask, server, "/caches"),
        ]  # fmt: skip
        wait_for(
            lambda: read_metrics(server)["flashpoint_queue_requests"] == 2, lambda: "they do not wait for the engine"
        )
        os.kill(server.engine_pid, signal.SIGKILL)
        for one in requests:
            problem(one.result(), 503, "engine_lost")
    wait_for(lambda: post(server, "/caches", b"{}", JSON).status == 201, lambda: "no cache is made again")


def test_a_list_of_caches_has_pages(cache_server):
    made = created(cache_server, count=5)

    def page(query):
        answer = ask(cache_server, f"/caches{query}", **bearer("alice"))
        assert answer.status == 200, answer
        return [one["id"] for one in answer.json["caches"]], answer.json.get("next")

    assert page("") == page("?limit=5") == (made, None)
    first, after = page("?limit=2")
    second, end = page(f"?limit=2&after={after}")
    assert (first, second) == (made[:2], made[2:4])
    posted(cache_server, "/caches/delete", {"caches": [made[3]]})  # the last one of a page may be gone
    assert page(f"?after={end}") == ([made[4]], None)
    for query in ("?limit=0", "?limit=1001", "?limit=x", "?after=x", f"?after={made[0]}", "?page=2"):
        problem(ask(cache_server, f"/caches{query}", **bearer("alice")), 422, "invalid_request")
    assert ask(cache_server, "/caches", **bearer("bob")).json == {"caches": []}
    posted(cache_server, "/caches/delete", {"caches": [one for one in made if one != made[3]]})
