"""Calls on KV caches end correctly if deadlines pass, clients leave, caches expire, keys are revoked, or servers stop.

A request whose id begins with gate- writes its tokens, and then waits in the engine until the test opens the gate
(tests/support/faulty).
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import random
import signal
from types import SimpleNamespace

import pytest

from flashpoint_server.engine.scheduling.cache_order import CacheQueue
from tests.support.gated import GatedServer
from tests.support.messages import JSON, ask, message, normal, post, problem
from tests.support.servers import wait_for
from tests.support.sockets import send


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def one(gated):
    """Yield the id of a new cache, and delete the cache after the test if it still exists."""
    one = created(gated.server)
    yield one
    ask(gated.server, f"/caches/{one}", "DELETE")


def created(server, headers=(), **options):
    document = {"kv_heads": 1, "head_dim": 8, **options}
    answer = post(server, "/caches", json.dumps(document).encode(), JSON, **dict(headers))
    assert answer.status == 201, answer
    return answer.json["caches"][0]["id"]


def tokens(count, *names):
    return {name: normal(1, 1, count, 8, seed=seed) for seed, name in enumerate(names)}


def writing(one, count=1):
    """Return a request that writes `count` tokens into the cache `one`. Requests for `reference` run one at a time."""
    return message(tokens(count, "q", "k", "v"), caches=[one], backend="reference")


def written(count):
    return message(tokens(count, "k", "v"))


def lengths(answer):
    assert answer.status == 200, answer
    return json.loads(answer.metadata["lengths"])


@pytest.mark.parametrize("how", ["attention", "append"])
def test_a_call_that_waits_beyond_its_deadline_writes_nothing(gated, pool, one, how):
    path, body = ("/attention", writing(one, 3)) if how == "attention" else (f"/caches/{one}/append", written(3))
    with gated.busy(pool, writing(one, 2)) as running:
        late = gated.post(pool, "late", body, path, x_timeout_ms=300)
        problem(late.result(), 504, "deadline_exceeded")
        behind = gated.post(pool, "behind", writing(one))
    assert lengths(running.result()) == [2]
    assert lengths(behind.result()) == [3]


def test_a_call_that_runs_beyond_its_deadline_has_written_all(gated, pool, one):
    gated.gate("gate").unlink(missing_ok=True)
    with contextlib.ExitStack() as inside:
        inside.callback(gated.gate("gate").touch)
        for patience in (500, 2000, 8000, 32000, 128000):  # milliseconds; retry until the call has started in time
            running = gated.post(pool, "gate", writing(one, 2), x_timeout_ms=patience)
            wait_for(lambda call=running: gated.begun(call.name) or call.done(), lambda: "it neither runs nor ends")
            problem(running.result(), 504, "deadline_exceeded")
            if gated.begun(running.name):
                break
        behind = gated.post(pool, "behind", writing(one))
        assert not behind.done()
    assert lengths(behind.result()) == [3]


def test_a_client_that_goes_in_the_middle_of_an_append_writes_nothing(gated, one):
    name, body = f"goes-{os.urandom(4).hex()}", written(4)
    with send(gated.server, body[:-40], path=f"/caches/{one}/append", length=len(body), request_id=name):
        wait_for(lambda: gated.inside() == 1, lambda: "it has not arrived")
    line = gated.server.wait_for_request(name)
    assert (line["status"], line["code"]) == (499, "client_gone")
    assert post(gated.server, f"/caches/{one}/append", written(2)).json == {"length": 2}


def test_a_client_that_goes_while_its_call_waits_writes_nothing(gated, pool, one):
    with gated.busy(pool, writing(one, 2)) as running:
        with gated.client(writing(one, 3)) as name:
            pass
        gated.wait_dropped(name)
        behind = gated.post(pool, "behind", written(1), f"/caches/{one}/append")
    assert lengths(running.result()) == [2]
    assert behind.result().json == {"length": 3}


def test_a_client_that_goes_while_its_call_runs_has_written_all(gated, pool, one):
    gated.gate("gate").unlink(missing_ok=True)
    name = f"gate-{os.urandom(4).hex()}"
    try:
        with send(gated.server, writing(one, 2), request_id=name):
            gated.wait_begun(name)
        line = gated.server.wait_for_request(name)
        assert (line["status"], line["code"]) == (499, "client_gone")
        behind = gated.post(pool, "behind", writing(one))
    finally:
        gated.gate("gate").touch()
    assert lengths(behind.result()) == [3]


def test_calls_on_one_cache_keep_their_order_whatever_their_priority(gated, pool, one):
    other = created(gated.server)
    with gated.busy(pool, writing(one, 2)) as running:
        low = gated.post(pool, "low", writing(one, 1), x_priority=0)
        high = gated.post(pool, "high", writing(one, 4), x_priority=9)
        cut = gated.post(pool, "cut", json.dumps({"length": 5}).encode(), f"/caches/{one}/truncate", media=JSON)
        elsewhere = gated.post(pool, "other", written(1), f"/caches/{other}/append")
        assert elsewhere.result().json == {"length": 1}  # a call on another cache does not wait
        assert not any(call.done() for call in (low, high, cut))
    assert [lengths(call.result()) for call in (running, low, high)] == [[2], [3], [7]]
    assert cut.result().json["lengths"] == [5]
    ask(gated.server, f"/caches/{other}", "DELETE")


def test_a_cache_does_not_expire_while_a_call_uses_it_or_waits_for_it(gated, pool):
    used, idle = (created(gated.server, ttl_s=0.2) for _ in range(2))

    def lost(which):
        return ask(gated.server, f"/caches/{which}").status == 410

    with gated.busy(pool, writing(used, 2)) as running:
        behind = gated.post(pool, "behind", writing(used))
        wait_for(lambda: lost(idle), lambda: "the other cache does not expire")
    assert lengths(running.result()) == [2]
    assert lengths(behind.result()) == [3]
    wait_for(lambda: lost(used), lambda: "it does not expire when nobody uses it")


def test_a_deletion_waits_for_the_calls_before_it_and_ends_those_behind(gated, pool):
    one = created(gated.server)
    with gated.busy(pool, writing(one, 2)) as running:
        name = f"delete-{os.urandom(4).hex()}"
        deleted = pool.submit(ask, gated.server, f"/caches/{one}", "DELETE", x_request_id=name)
        gated.wait_queued(name)
        behind = gated.post(pool, "behind", writing(one))
        assert not deleted.done()
        assert not behind.done()
    assert lengths(running.result()) == [2]
    assert deleted.result().status == 204
    problem(behind.result(), 404, "cache_not_found")


def test_a_fork_of_a_cache_has_what_the_calls_before_it_have_written(gated, pool, one):
    with gated.busy(pool, writing(one, 2)):
        body = json.dumps({"caches": [one]}).encode()
        forked = gated.post(pool, "fork", body, "/caches/fork", media=JSON)
        behind = gated.post(pool, "behind", writing(one))
        assert not forked.done()
    copy = forked.result().json["caches"][0]
    assert copy["lengths"] == [2]
    assert lengths(behind.result()) == [3]
    ask(gated.server, f"/caches/{copy['id']}", "DELETE")


@pytest.mark.slow
def test_a_server_that_stops_answers_the_calls_on_its_caches(start_server, tmp_path, pool):
    stopping = GatedServer(start_server, tmp_path, shutdown_timeout=3600)
    server, one = stopping.server, created(stopping.server)
    with stopping.busy(pool, writing(one, 2)) as running:
        behind = [stopping.post(pool, "behind", writing(one, n)) for n in (1, 2)]
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(lambda line: line["event"] == "draining")
        assert not any(call.done() for call in (running, *behind))
    assert [lengths(call.result()) for call in (running, *behind)] == [[2], [3], [5]]
    assert server.wait_exit() == 0


KEYS = {name: f"key-of-{name}-with-some-length" for name in ("alice", "bob")}


def write_keys(file, *names):
    digests = {name: hashlib.sha256(KEYS[name].encode()).hexdigest() for name in names}
    rows = [f'[{name}]\nsha256 = "{digest}"\nrights = ["attention", "info"]\n' for name, digest in digests.items()]
    new = file.with_suffix(".new")
    new.write_text("\n".join(rows))
    new.replace(file)


@pytest.mark.slow
def test_the_caches_of_a_removed_key_are_freed_behind_the_calls_that_run(start_server, tmp_path, pool):
    file = tmp_path / "keys.toml"
    write_keys(file, *KEYS)
    locked = GatedServer(start_server, tmp_path, api_keys_file=file)
    server = locked.server
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())

    def cache_count():
        return ask(server, "/info", **alice).json["caches"]["caches"]

    used, idle = created(server, bob), created(server, bob)
    alices = created(server, alice)
    wait_for(lambda: cache_count() == 3, lambda: "they are not there")
    locked.gate("gate").unlink(missing_ok=True)
    try:
        running = locked.post(pool, "gate", writing(used, 2), **bob)
        locked.wait_begun(running.name)
        behind = locked.post(pool, "behind", writing(used), **bob)
        write_keys(file, "alice")
        wait_for(lambda: cache_count() == 2, lambda: "the idle cache is still there")
    finally:
        locked.gate("gate").touch()
    assert [lengths(call.result()) for call in (running, behind)] == [[2], [3]]
    wait_for(lambda: cache_count() == 1, lambda: "the used cache is still there")
    problem(ask(server, f"/caches/{used}", **bob), 401, "unauthorized")
    write_keys(file, *KEYS)
    wait_for(lambda: ask(server, "/caches", **bob).status == 200, lambda: "the key is not back")
    for gone in (used, idle):
        problem(ask(server, f"/caches/{gone}", **bob), 410, "cache_lost")
    assert ask(server, f"/caches/{alices}", **alice).status == 200


class Call(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_each_call_runs_once_and_behind_all_before_it_on_its_caches():
    """Calls on one to three of four caches come, end, and leave while they wait, in random order."""
    draw, order, inside = random.Random(0), CacheQueue(), []  # `inside`: the calls that have not left, in their order

    def starts(call):
        assert not call.runs
        assert not any(set(other.caches) & set(call.caches) for other in inside[: inside.index(call)])
        call.runs = True

    for _ in range(5000):
        if len(inside) < 12 and draw.random() < 0.55:
            inside.append(call := Call(caches=draw.sample(range(4), draw.randint(1, 3)), runs=False))
            if order.join(call):
                starts(call)
        elif inside:
            call = draw.choice(inside)
            inside.remove(call)
            for other in order.leave(call):
                starts(other)
        assert {*order.waiting(lambda _: True)} == {call for call in inside if not call.runs}
        for n, call in enumerate(inside):
            assert call.runs or any(set(other.caches) & set(call.caches) for other in inside[:n])
