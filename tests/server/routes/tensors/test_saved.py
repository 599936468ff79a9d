"""/saved lists, describes and deletes saved forwards. They have limits, and end with their engine or API key."""

import os
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.caches import KEYS, SAVED_QUOTA, bearer, started_for_saved, wait_both, write_keys
from tests.support.messages import JSON, ask, message, normal, post, problem, read_metrics
from tests.support.saved import HQ, D, S, delete, forward, gradient, qkv, saved_of
from tests.support.servers import wait_for


def test_what_is_saved_is_listed_described_and_counted(saved_server):
    tensors = qkv()
    before = read_info(saved_server)
    ids = [saved_of(forward(saved_server, tensors, save=True)) for _ in range(3)]
    size = sum(4 * t.numel() for t in tensors.values()) + 4 * 2 * HQ * S * (D + 1) + 1024
    wait_for(lambda: read_info(saved_server)["saved"] == before["saved"] + 3, lambda: "the three were not counted")
    assert read_info(saved_server)["saved_bytes"] == before["saved_bytes"] + 3 * size
    listed = ask(saved_server, "/saved", **bearer("alice")).json["saved"]
    assert [one["id"] for one in listed if one["id"] in ids] == ids
    one = ask(saved_server, f"/saved/{ids[1]}", **bearer("alice")).json
    assert one.pop("expires_in_s") <= 600
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    shapes |= {"o": [2, HQ, S, D], "lse": [2, HQ, S]}
    assert one == {"id": ids[1], "dtype": "float32", "shapes": shapes, "bytes": size, "ttl_s": 600.0}
    assert ask(saved_server, "/saved", **bearer("bob")).json == {"saved": []}
    for one in ids:
        delete(saved_server, one)
    assert not {one["id"] for one in ask(saved_server, "/saved", **bearer("alice")).json["saved"]} & {*ids}


def read_info(server):
    return ask(server, "/info", **bearer("alice")).json["caches"]


def test_ids_of_others_and_guessed_ones_are_not_found(saved_server):
    do = {"do": normal(2, HQ, S, D)}
    one = saved_of(forward(saved_server, qkv(), save=True))
    cache = post(saved_server, "/caches", b"{}", JSON, **bearer("alice")).json["caches"][0]["id"]
    other = one[:-3] + ("AAA" if one[-3:] != "AAA" else "BBB")
    guesses = [("bob", one), *(("alice", guess) for guess in (other, "s", "x" * 5000, one + "A", "s" + cache[1:]))]
    for name, guess in guesses:
        answers = [
            gradient(saved_server, do, name, saved=guess), ask(saved_server, f"/saved/{guess}", **bearer(name)),
            delete(saved_server, guess, name),
        ]  # fmt: skip
        assert [(answer.status, answer.json["code"]) for answer in answers] == [(404, "saved_not_found")] * 3
    problem(forward(saved_server, {"q": qkv()["q"]}, caches=["c" + one[1:]]), 404, "cache_not_found")
    assert gradient(saved_server, do, saved=one).status == 200
    delete(saved_server, one)
    ask(saved_server, f"/caches/{cache}", "DELETE", **bearer("alice"))


def test_memory_is_the_callers_with_that_of_caches(saved_server):
    tensors = qkv()
    ids = [saved_of(forward(saved_server, tensors, "carol", save=True)) for _ in range(2)]
    problem(forward(saved_server, tensors, "carol", save=True), 429, "key_limit")
    assert forward(saved_server, tensors, "carol").status == 200
    delete(saved_server, ids[0], "carol")
    cache = post(saved_server, "/caches", b'{"max_length": 100, "kv_heads": 1, "head_dim": 4}', JSON, **bearer("carol"))
    problem(forward(saved_server, tensors, "carol", save=True), 429, "key_limit")
    ask(saved_server, f"/caches/{cache.json['caches'][0]['id']}", "DELETE", **bearer("carol"))
    ids[0] = saved_of(forward(saved_server, tensors, "carol", save=True))
    for one in ids:
        delete(saved_server, one, "carol")
    problem(forward(saved_server, qkv(length=2048), save=True), 413, "work_too_large")
    ids = []
    while (answer := forward(saved_server, qkv(length=200), save=True)).status == 200:
        ids.append(saved_of(answer))
    assert len(ids) == 3
    refusal = problem(answer, 429, "cache_memory")
    assert answer.headers["retry-after"] == "1", refusal
    do = {"do": normal(2, HQ, 200, D)}
    assert gradient(saved_server, do, saved=ids[0]).status == 200  # the refused requests evicted no forward
    for one in ids:
        delete(saved_server, one)
    wait_for(lambda: forward_and_delete(saved_server), lambda: "there was no memory again")


def forward_and_delete(server):
    """Save a forward and delete it again; return whether both requests succeeded.

    Saving can fail for a moment after other forwards were deleted: an HTTP process learns of freed memory with delay.
    """
    answer = forward(server, qkv(length=200), save=True)
    return answer.status == 200 and delete(server, saved_of(answer)).status == 204


@pytest.mark.slow
def test_a_saved_forward_expires(start_server):
    server = start_server(saved_ttl=0.2)
    answer = post(server, "/attention", message(qkv(), save=True))
    one = answer.metadata["saved"]
    do = {"do": normal(2, HQ, S, D)}
    wait_for(lambda: ask(server, f"/saved/{one}").status == 410, lambda: "it did not expire")
    problem(post(server, "/attention/grad", message(do, saved=one)), 410, "saved_lost")
    problem(ask(server, f"/saved/{one}", "DELETE"), 410, "saved_lost")
    assert ask(server, "/saved").json == {"saved": []}

    def counted():
        return [v for n, v in read_metrics(server).items() if n.startswith("flashpoint_saved_forwards{")]

    wait_for(lambda: counted() == [0.0], lambda: "the metric did not fall")


@pytest.mark.slow
def test_what_an_engine_held_is_lost_with_it_and_with_its_owner(start_server, tmp_path_factory):
    server = started_for_saved(start_server, tmp_path_factory)
    do = {"do": normal(2, HQ, S, D)}
    one, other = (saved_of(forward(server, qkv(), name, save=True)) for name in ("alice", "bob"))
    write_keys(server.keys_file, ["alice", "carol"], SAVED_QUOTA)
    wait_for(lambda: read_info(server)["saved"] == 1, lambda: "bob's was not freed")
    write_keys(server.keys_file, KEYS, SAVED_QUOTA)
    wait_for(lambda: ask(server, "/info", **bearer("bob")).status == 200, lambda: "bob did not come back")
    wait_for(lambda: gradient(server, do, "bob", saved=other).status == 410, lambda: "bob's was not lost")
    os.kill(server.engine_pid, signal.SIGKILL)

    def lost():
        answers = [gradient(server, do, saved=one) for _ in range(6)]  # from both HTTP processes
        return all(answer.status == 410 for answer in answers)

    wait_for(lost, lambda: "it is not lost")
    problem(delete(server, one), 410, "saved_lost")
    wait_both(server)
    one = saved_of(forward(server, qkv(), save=True))
    assert gradient(server, do, saved=one).status == 200
