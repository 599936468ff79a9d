"""The calls of a `Round` run concurrently. An error ends the round; if the round is `whole`, errors are results."""

import asyncio
import contextlib
import pickle
import threading
import time
from types import SimpleNamespace

import pytest

import flashpoint
from flashpoint._calls.service import lookup
from flashpoint._shards import rounds
from flashpoint._shards.rounds import Deadline, Tasks, Threads
from flashpoint._shards.spread import PartCall, Round
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            server = stack.enter_context(ScriptedServer())
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.002}).start()
            stack.callback(server.shutdown)
            made.append(server)
        yield made


@pytest.fixture(params=["threads", "asyncio"])
def run(request, servers):
    """Return `run(steps, deadline)`, which runs the rounds that `steps` yields, with a client for each server."""

    def with_threads(steps, deadline=None):
        with contextlib.ExitStack() as stack:
            threads = Threads([stack.enter_context(flashpoint.Client(s.url, retries=0)) for s in servers])
            try:
                return threads.run(steps, deadline)
            finally:
                threads.close()

    def with_tasks(steps, deadline=None):
        async def inside():
            async with contextlib.AsyncExitStack() as stack:
                made = [flashpoint.AsyncClient(server.url, retries=0) for server in servers]
                return await Tasks([await stack.enter_async_context(each) for each in made]).run(steps, deadline)

        return asyncio.run(inside())

    return with_threads if request.param == "threads" else with_tasks


def says(text):
    return lambda handler: handler.answer(body=text, media="application/json")


def steps(*rounds):
    found = []
    for asked in rounds:
        found.append((yield asked))
    return found


def calls(*paths):
    return [PartCall(number % 2, lookup(path)) for number, path in enumerate(paths)]


def test_results_come_in_the_order_of_the_calls_and_rounds_follow_each_other(run, servers):
    servers[0].script.extend([says(b'{"a": 1}'), says(b'{"c": 3}')])
    servers[1].script.append(says(b'{"b": 2}'))
    found = run(steps(Round(calls("/a", "/b")), Round(calls("/c"))))
    assert found == [[{"a": 1}, {"b": 2}], [{"c": 3}]]
    assert [path for _, path, *_ in servers[0].requests] == ["/a", "/c"]


def test_the_first_error_ends_a_round_and_names_its_server(run, servers):
    servers[0].script.append(says(b"{}"))
    servers[1].script.append(lambda handler: handler.problem(500))
    with pytest.raises(flashpoint.ServerError, match=f"{servers[1].url}: some detail"):
        run(steps(Round(calls("/a", "/b")), Round(calls("/c"))))
    assert "/c" not in [path for _, path, *_ in servers[0].requests]  # no second round


def test_all_results_of_a_whole_round_come_errors_too(run, servers):
    servers[0].script.append(lambda handler: handler.problem(404))
    servers[1].script.append(says(b'{"b": 2}'))
    ((error, answer),) = run(steps(Round(calls("/a", "/b"), whole=True)))
    assert isinstance(error, flashpoint.BadRequestError)
    assert str(error).startswith("404 some_code: " + servers[0].url)
    assert answer == {"b": 2}


def test_a_deadline_holds_for_all_rounds(run, servers, monkeypatch):
    servers[0].script.append(says(b"{}"))
    deadline = Deadline(60.0)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    with pytest.raises(flashpoint.DeadlineExceededError):
        run(steps(Round(calls("/a"))), deadline)
    assert servers[0].requests == []
    with pytest.raises(flashpoint.InvalidInputError, match="timeout"):
        Deadline(-1)


@pytest.mark.parametrize(("kind", "of"), [(Threads, flashpoint.Client), (Tasks, flashpoint.AsyncClient)])
def test_what_runs_rounds_can_be_pickled_with_its_clients(kind, of):
    urls = ["http://one.example", "http://two.example"]
    copied = pickle.loads(pickle.dumps(kind([of(url) for url in urls])))
    assert type(copied) is kind
    assert [(type(client), client.url) for client in copied.clients] == [(of, url) for url in urls]
