"""verify and benchmark of both clients work with a scripted server."""

import threading

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._http import drive, exchange, listening
from flashpoint_contract.schemas.benchmark import EVENT
from flashpoint_contract.wire import MEDIA_TYPE, decode_options, head_size, parse_head
from tests.support.proof_answers import AT, EVENTS, JOB, REPORT, ROW, SHAPES, frames, says, streams

JSON = "application/json"
Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
PATIENCE = 60  # seconds; only ends a hang

pytestmark = pytest.mark.usefixtures("delays")


def heard(client, *arguments, seen=lambda event: None):
    """Return the ids of the events of job j1 from either client; call `seen` with each event as it arrives."""
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
        client._loop.run_until_complete(listen())
    return ids


def awaited(client, value):
    return value if isinstance(client, flashpoint.Client) else client._loop.run_until_complete(value)


@pytest.fixture
def reach(connect):
    """Return a factory of clients of either kind; `benchmark_run` needs no await."""

    def reach(*args, **settings):
        client = connect(*args, **settings)
        if not isinstance(client, flashpoint.Client):
            client.benchmark_run = client._client.benchmark_run
        return client

    return reach


def test_a_problem_that_the_server_draws_is_sent_as_json(scripted, reach):
    scripted.script.append(says(REPORT))
    report = reach(scripted.url).verify(
        shape={"q_len": np.int64(9), "head_dim": 4}, dtype="bfloat16", causal=True, window=(3, 0), request_id="mine"
    )
    assert (report.ok, report.tensors[0].name, report.tensors[0].histogram[0].count) == (True, "o", 24)
    method, path, headers, body = scripted.requests[0]
    assert (method, path, headers["Content-Type"], headers["Accept"]) == ("POST", "/verify", JSON, JSON)
    assert headers["X-Request-Id"] == "mine"
    sent = flashpoint.VerifyRequest.model_validate_json(body)
    assert (sent.shape.q_len, sent.shape.kv_len, sent.dtype, sent.window) == (9, 9, "bfloat16", (3, 0))


def test_tensors_and_answers_to_be_judged_are_sent_as_a_message(scripted, reach):
    scripted.script.append(says(REPORT | {"backend": "given"}))
    assert reach(scripted.url).verify(Q, Q, Q, do=Q, o=Q, dq=Q, causal=True).backend == "given"
    _, path, headers, body = scripted.requests[0]
    assert (path, headers["Content-Type"], headers["Accept"]) == ("/verify", MEDIA_TYPE, JSON)
    head = parse_head(body[: head_size(body[:8])])
    assert {t.name for t in head.tensors} == {"q", "k", "v", "do", "o", "dq"}
    assert decode_options(head.metadata) == {"causal": True}


@pytest.mark.parametrize(
    ("arguments", "keywords", "field"),
    [
        ((), {}, "shape"), ((Q,), {}, "k"), ((Q, Q, Q), {"shape": {}}, "shape"), ((Q, Q, Q), {"seed": 1}, "seed"),
        ((), {"shape": {"q_len": 4, "head_dim": 4}, "do": Q}, "do"), ((), {"shape": {"q_len": 4}}, "shape.head_dim"),
        ((), {"shape": {"q_len": 4, "head_dim": 4}, "casual": True}, "casual"),
    ],
)  # fmt: skip
def test_a_verification_that_cannot_be_is_refused_before_anything_is_sent(scripted, reach, arguments, keywords, field):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        reach(scripted.url).verify(*arguments, **keywords)
    assert [problem.field for problem in info.value.errors] == [field]
    assert not scripted.requests


def test_an_answer_of_another_shape_is_no_report(scripted, reach):
    scripted.script.extend([says({**REPORT, "extra": 1}), says([])])
    client = reach(scripted.url)
    for _ in range(2):
        with pytest.raises(flashpoint.ProtocolError, match="no VerifyReport"):
            client.verify(shape={"q_len": 4, "head_dim": 4})


@pytest.mark.parametrize("transport", [None, httpx.HTTPTransport], ids=["own", "httpx"])
def test_a_verification_tells_its_progress_as_it_comes(scripted, reach, transport):
    """The server continues only after the caller has received the previous block."""
    settings, seen = {}, threading.Semaphore(0)
    if transport:
        is_async = not isinstance(reach(scripted.url), flashpoint.Client)
        settings = {"transport": httpx.AsyncHTTPTransport() if is_async else httpx.HTTPTransport()}
    results = []

    def hear(at):
        results.append((at.done, at.total, at.stage, at.direction))
        seen.release()

    def step(handler):
        handler.begin_chunks()
        for done in range(2):
            handler.chunk(frames([AT | {"done": done}]))
            assert seen.acquire(timeout=PATIENCE)
        handler.chunk(frames([{"kind": "report", "report": REPORT}]))
        handler.end_chunks()

    scripted.script.append(step)
    report = reach(scripted.url, **settings).verify(shape={"q_len": 4, "head_dim": 4}, progress=hear)
    assert (report, results) == (
        flashpoint.VerifyReport.model_validate(REPORT), [(n, 9, "float64", "forward") for n in range(2)]
    )  # fmt: skip
    assert scripted.requests[0][2]["Accept"] == "text/event-stream"


def test_a_verification_whose_events_break_is_asked_again(scripted, reach):
    """It has no side effect; a refusal after its events is retried like any other."""
    full = {"status": 503, "code": "out_of_memory", "detail": "d"}
    scripted.script.extend(
        [
            streams([AT | {"done": 1}], end=lambda h: h.vanish()),
            streams([AT | {"done": 0}]),
            streams([AT | {"done": 0}, {"kind": "problem", "problem": full}]),
            streams([AT | {"done": 0}, {"kind": "report", "report": REPORT}]),
        ]
    )
    results = []
    report = reach(scripted.url, retries=3).verify(
        shape={"q_len": 4, "head_dim": 4}, progress=lambda at: results.append(at.done)
    )
    assert (report.ok, results) == (True, [1, 0, 0, 0])


def test_a_verification_that_fails_behind_its_events_raises(scripted, reach):
    late = {"status": 504, "code": "deadline_exceeded", "detail": "the deadline passed", "request_id": "r7"}
    scripted.script.extend([streams([{"kind": "problem", "problem": late}]), streams([AT | {"done": -1}])])
    client = reach(scripted.url)
    with pytest.raises(flashpoint.DeadlineExceededError, match="the deadline passed") as info:
        client.verify(shape={"q_len": 4, "head_dim": 4}, progress=print)
    assert info.value.request_id == "r7"
    with pytest.raises(flashpoint.ProtocolError, match="cannot be read"):
        client.verify(shape={"q_len": 4, "head_dim": 4}, progress=print)


def test_a_caller_that_stops_within_its_progress_ends_the_connection(scripted):
    ended = threading.Event()

    def waits_for_the_end(handler):
        if handler.rfile.read(1) == b"":
            ended.set()

    def stop(at):
        raise KeyboardInterrupt

    scripted.script.append(streams([AT | {"done": 0}], end=waits_for_the_end))
    with flashpoint.Client(scripted.url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.verify(shape={"q_len": 4, "head_dim": 4}, progress=stop)
        assert ended.wait(PATIENCE)


def test_a_benchmark_is_submitted_watched_and_done(scripted, reach):
    done = JOB | {"state": "done", "rows": [ROW]}
    scripted.script.extend([says(JOB, 202), streams(EVENTS), says(done)])
    client = reach(scripted.url)
    run = client.benchmark(shapes=SHAPES, backends=["tiled"], causal=[False, True])
    job = awaited(client, run.wait())
    assert (run.id, job.state, job.rows[0].backend) == ("j1", "done", "tiled")
    (submitted, listened, looked) = scripted.requests
    assert (*submitted[:2], submitted[2]["Content-Type"]) == ("POST", "/benchmark", JSON)
    assert flashpoint.BenchmarkRequest.model_validate_json(submitted[3]).causal == (False, True)
    assert (*listened[:2], listened[2]["Accept"]) == ("GET", "/benchmark/j1/events", "text/event-stream")
    assert looked[:2] == ("GET", "/benchmark/j1")


def test_a_benchmark_is_cancelled(scripted, reach):
    scripted.script.append(says(JOB | {"state": "cancelled"}))
    client = reach(scripted.url)
    assert awaited(client, client.benchmark_run("j1").cancel()).state == "cancelled"
    assert scripted.requests[0][:2] == ("DELETE", "/benchmark/j1")


def test_events_come_as_they_are_sent(scripted):
    """The server sends the next event only after the client has the previous one, and ends no answer."""
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
    """After breaks, early ends and refusals, no event is lost, and a repeated event counts once."""
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
    """The timeout applies to the start of an answer: a benchmark may take longer. It expires after event 2."""
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


def test_a_benchmark_is_not_started_twice(scripted, reach):
    """A full server did nothing. A server that vanished may have started it."""
    scripted.script.extend([lambda h: h.problem(429), lambda h: h.vanish()])
    with pytest.raises(flashpoint.ConnectionFailedError):
        reach(scripted.url).benchmark(preset="papers")
    assert len(scripted.requests) == 2
