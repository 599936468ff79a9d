"""`verify` sends a problem, reports progress and returns a report, in the synchronous and the asyncio client."""

import threading

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint_contract.wire import MEDIA_TYPE, decode_options, head_size, parse_head
from tests.support.verify_answers import AT, REPORT, frames, says, streams

JSON = "application/json"
Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
PATIENCE = 60  # seconds; a longer wait is a hang
pytestmark = pytest.mark.usefixtures("delays")


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
    """Each event arrives before the server sends the next one: the server waits until `progress` has been called."""
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
    """A verification has no side effects, so it is retried after a broken stream and after an error event."""
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
