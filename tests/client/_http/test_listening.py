"""The client yields the events of a benchmark job as the server sends them, over as many connections as needed."""

import threading

import httpx
import pytest

import flashpoint
from flashpoint._http import drive, exchange, listening
from flashpoint_contract.schemas.benchmark import EVENT
from tests.support.verify_answers import EVENTS, JOB, frames, says, streams

PATIENCE = 60  # seconds; a longer wait is a hang
pytestmark = pytest.mark.usefixtures("delays")


def heard(client, *arguments, seen=lambda event: None):
    """Return the ids of all events of the job j1, from either kind of client; call `seen` with each event."""
    run, ids = client.benchmark_run("j1"), []

    def take(event):
        ids.append(event.id)
        seen(event)

    async def listen():
        async for event in run.events(*arguments):
            take(event)

    if isinstance(run, flashpoint.BenchmarkRun):
        for event in run.events(*arguments):
            take(event)
    else:
        client.loop.run_until_complete(listen())
    return ids


def test_events_come_as_they_are_sent(scripted):
    """The server sends an event only after the caller has the previous one, and does not end its response."""
    seen, over = threading.Semaphore(0), threading.Event()

    def step(handler):
        handler.begin_chunks()
        for event in EVENTS:
            handler.chunk(frames([event]))
            assert seen.acquire(timeout=PATIENCE)
        over.set()

    scripted.script.append(step)
    with flashpoint.Client(scripted.url) as client:
        results = []
        for event in client.benchmark_run("j1").events():
            results.append(event)
            seen.release()
        assert results == [EVENT.validate_python(e) for e in EVENTS]
        assert over.wait(PATIENCE)


def test_a_reader_that_stops_early_ends_the_connection(scripted):
    ended = threading.Event()

    def waits_for_the_end(handler):
        if handler.rfile.read(1) == b"":
            ended.set()

    scripted.script.append(streams(EVENTS[:1], end=waits_for_the_end))
    with flashpoint.Client(scripted.url) as client:
        events = client.benchmark_run("j1").events()
        assert next(events).id == 1
        events.close()
        assert ended.wait(PATIENCE)


@pytest.mark.parametrize("transport", [None, httpx.HTTPTransport], ids=["own", "httpx"])
def test_events_go_on_where_a_connection_broke(scripted, reach, transport):
    """After broken connections, early ends and errors, no event is lost, and a repeated event is yielded once."""
    settings = {}
    if transport:
        is_async = not isinstance(reach(scripted.url), flashpoint.Client)
        settings = {"transport": httpx.AsyncHTTPTransport() if is_async else httpx.HTTPTransport()}
    scripted.script.extend(
        [
            streams(EVENTS[:2], end=lambda h: h.vanish()),
            lambda h: h.problem(503),
            streams(EVENTS[1:3]),
            lambda h: h.vanish(),
            streams(EVENTS[3:]),
        ]
    )
    assert heard(reach(scripted.url, retries=2, **settings)) == [1, 2, 3, 4, 5]
    assert [request[2]["Last-Event-ID"] for request in scripted.requests] == ["0", "2", "2", "3", "3"]


def test_a_connection_whose_time_is_over_is_followed_by_another(scripted, reach, clock):
    """The timeout limits one connection, not the benchmark. It expires after event 2, and the client reconnects."""
    time, release = clock(drive, exchange, listening), threading.Event()
    scripted.script.extend([streams(EVENTS[:2], end=lambda h: release.wait(PATIENCE)), streams(EVENTS[2:])])
    client = reach(scripted.url, retries=0, timeout=300)
    try:
        assert heard(client, seen=lambda event: event.id == 2 and time.advance(300)) == [1, 2, 3, 4, 5]
    finally:
        release.set()
    assert len(scripted.requests) == 2


def test_events_may_begin_later(scripted, reach):
    scripted.script.append(streams(EVENTS[3:]))
    assert heard(reach(scripted.url), 3) == [4, 5]
    assert scripted.requests[0][2]["Last-Event-ID"] == "3"


def test_retries_of_events_end(scripted, reach):
    scripted.script.extend([streams([])] * 9)
    with pytest.raises(flashpoint.ConnectionFailedError, match="ended before"):
        heard(reach(scripted.url, retries=2))
    assert len(scripted.requests) == 3


@pytest.mark.parametrize(
    ("step", "family"),
    [
        (lambda h: h.problem(404, "not_found"), flashpoint.BadRequestError),
        (says(JOB), flashpoint.ProtocolError),
        (streams([{"id": 1, "kind": "surprise"}]), flashpoint.ProtocolError),
    ],
)
def test_malformed_events_raise_at_once(scripted, reach, step, family):
    scripted.script.append(step)
    with pytest.raises(family):
        heard(reach(scripted.url))
    assert len(scripted.requests) == 1
