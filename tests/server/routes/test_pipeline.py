"""The server refuses a call with invalid headers, or with too much work or memory, before the engine gets it."""

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import time
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_server.config.settings import Settings
from flashpoint_server.http.request import Request
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.pipeline import deadline_of, reply, submit, write
from tests.support.constant_answers import given_up, wide
from tests.support.messages import JSON, SAFETENSORS, ask, message, normal, post, problem, small
from tests.support.servers import wait_for
from tests.support.short_sequences import short_sequences
from tests.support.sockets import nothing_inside, send

GOOD = small()


INVALID_HEADERS = {"x_timeout_ms": ["0", "-1", "1.5", "soon"], "x_priority": ["10", "-1", "high", ""]}


@pytest.mark.parametrize(("header", "value"), [(h, v) for h, values in INVALID_HEADERS.items() for v in values])
def test_invalid_headers_are_422(server, header, value):
    document = problem(post(server, "/attention", GOOD, **{header: value}), 422, "invalid_request")
    assert document["errors"][0]["loc"][0].lower() == header.replace("_", "-")


@pytest.mark.parametrize("ms", ["1000000000000000", "9" * 5000, "0" * 30 + "60000"])
def test_a_longer_deadline_than_the_servers_is_cut(server, ms):
    assert post(server, "/attention", GOOD, x_timeout_ms=ms).status == 200


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 3), ("1000", 1), ("00007000", 7), ("7001", 7), ("9" * 15, 7), ("9" * 5000, 7)]
)
def test_a_deadline_is_the_callers_up_to_the_longest_and_else_the_servers(asked, seconds):
    settings = Settings(default_timeout_ms=3000, max_timeout_ms=7000)
    before = time.monotonic()
    deadline = deadline_of({} if asked is None else {"x-timeout-ms": asked}, settings)
    assert before + seconds <= deadline <= time.monotonic() + seconds


def test_an_answer_that_is_ready_after_its_deadline_is_refused():
    """The deadline may pass while an answer is encoded, after the engine has computed it in time."""
    with pytest.raises(Refusal) as refused:
        asyncio.run(write(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(remaining=lambda: 0.0), [], {}))
    assert refused.value.code == "deadline_exceeded"


def test_a_large_answer_may_take_as_long_as_the_slowest_rate_needs():
    class Direct:
        gone, patience = False, 0.0

        async def answer(self, fields, parts, patience):
            self.patience = patience
            return True

    direct, settings = Direct(), Settings(body_timeout=3, body_rate=1000)
    request = Request("POST", "/", {}, "one")
    request.body = SimpleNamespace(direct=direct)
    asyncio.run(reply(SimpleNamespace(settings=settings), request, [bytes(4000), bytes(1000)], {}))
    assert (direct.patience, request.bytes_out) == (3 + 5, 5000)


KEY = {"authorization": "Bearer all"}


def test_work_that_can_never_fit_413(strict, server):
    many = {name: torch.empty(9, 1, 0, 8) for name in "qkv"}
    problem(post(strict, "/attention", message(many), **KEY), 413, "work_too_large")
    # q has 4 MB, and k and v are empty; the answer would have 10^12 zeros
    wide = {"q": torch.zeros(1, 1, 10**6, 1), "k": torch.zeros(1, 1, 0, 1), "v": torch.zeros(1, 1, 0, 10**6)}
    problem(post(server, "/attention", message(wide, backend="reference")), 413, "work_too_large")
    as_json = post(strict, "/attention", message({n: normal(1, 1, 200, 128) for n in "qkv"}), accept=JSON, **KEY)
    problem(as_json, 413, "work_too_large")


def test_work_that_never_fits_the_staging_memory_is_413(gated):
    problem(post(gated.server, "/attention", wide(1, 1 << 17)), 413, "work_too_large")
    assert post(gated.server, "/attention", GOOD).status == 200


@pytest.mark.slow
def test_a_price_in_predicted_seconds_fills_the_queue(start_server):
    server = start_server(queue_seconds=0.01)
    tensors, options = short_sequences("reference")
    large = message(tensors, **options)
    with send(server, large, request_id="first"):
        wait_for(lambda: server.get("/info")[1]["load"]["requests"], lambda: "it does not arrive")
        refused = post(server, "/attention", large)
        problem(refused, 429, "queue_full")
        assert "compute seconds" in refused.json["detail"]


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "chunked"])
@pytest.mark.parametrize("answered", [JSON, SAFETENSORS])
@pytest.mark.parametrize("media", [JSON, SAFETENSORS])
def test_the_memory_of_bodies_and_answers_counts_while_a_request_runs(gated, media, answered, chunked):
    """The bytes in /info are at least those of the body, or of its tensors, and of the answer's text."""
    tensors = {name: normal(1, 2, 64, 16, seed=seed) for seed, name in enumerate("qkv")}
    body = message(tensors, backend="triton")
    if media == JSON:
        body = json.dumps({n: t.tolist() for n, t in tensors.items()} | {"backend": "triton"}).encode()
    pieces = iter([body]) if chunked else body
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        gated.busy(pool, pieces, media=media, accept=answered) as answer,
    ):
        counted = gated.server.get("/info")[1]["load"]["bytes"]
    held = len(body) if media == JSON else 4 * tensors["q"].nbytes
    assert counted >= held + (len(answer.result().body) if answered == JSON else 0)


def infer_body(tensors):
    inputs = [
        {"name": n, "shape": list(t.shape), "datatype": "FP32", "data": t.flatten().tolist()}
        for n, t in tensors.items()
    ]
    return json.dumps({"inputs": inputs, "parameters": {"backend": "triton"}}).encode()


def test_a_deadline_in_the_header_holds_on_each_route(gated):
    tensors = {name: normal(1, 1, 4, 8, seed=seed) for seed, name in enumerate("qkv")}
    with_do = {**tensors, "do": tensors["q"]}
    calls = [
        ("/attention", message(tensors, backend="triton"), SAFETENSORS),
        ("/attention", json.dumps({n: t.tolist() for n, t in tensors.items()} | {"backend": "triton"}).encode(), JSON),
        ("/attention/grad", message(with_do, backend="triton"), SAFETENSORS),
        ("/verify", message(tensors, backend="triton"), SAFETENSORS),
        ("/v2/models/attention/infer", infer_body(tensors), JSON),
        ("/v2/models/attention_grad/infer", infer_body(with_do), JSON),
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool, gated.busy(pool, message(tensors, backend="triton")):
        late = {
            (path, media): pool.submit(
                post, gated.server, path, body, media, x_request_id=f"gate-{n}", x_timeout_ms=300
            )
            for n, (path, body, media) in enumerate(calls)
        }
        concurrent.futures.wait(late.values(), timeout=60)
        answers = {at: answer.result() for at, answer in late.items() if answer.done()}
    assert answers.keys() == late.keys()
    for at, answer in answers.items():  # 429 if what is ahead is predicted to take longer than the time that is left
        assert answer.status in (429, 504), at
        assert b"deadline" in answer.body, (at, answer)


@pytest.mark.parametrize("how", ["oom", "bug", "unread", "leaves"])
def test_a_forward_whose_answer_does_not_arrive_leaves_nothing_saved(gated, how):
    server = gated.server

    def held():
        return [ask(server, "/info").json["caches"][name] for name in ("bytes", "saved")]

    def no_more_than_before():
        return all(now <= then for now, then in zip(held(), before, strict=True))

    nothing_inside(server)
    before, tensors = held(), {name: normal(1, 1, 4, 8, seed=seed) for seed, name in enumerate("qkv")}
    body = message(tensors, save=True, backend="triton")
    if how == "unread":
        q, k = torch.zeros(1, 4, 1 << 12, 1), torch.zeros(1, 4, 1, 1)
        large = message({"q": q, "k": k, "v": torch.ones(1, 4, 1, 256)}, save=True)
        with send(server, large, request_id="unread-saving", receive_buffer=1 << 16):
            given_up(server, "unread-saving")
    elif how == "leaves":
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            gated.busy(pool, message(tensors, backend="triton")),
            gated.client(body),
        ):
            pass
    else:
        assert post(server, "/attention", body, x_request_id=f"{how}-saving").status >= 500
    nothing_inside(server)
    wait_for(no_more_than_before, lambda: f"{held()} is left, and before it was {before}", seconds=60)


def test_what_an_engine_answered_is_not_kept_until_the_deadline():
    """The answer of a call with a deadline far away is freed when the call ends, in an event loop that goes on."""

    async def call():
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        body = SimpleNamespace(complete=True, deadline=None, watching=lambda gone: contextlib.nullcontext())
        engine = SimpleNamespace(submit=lambda job: answer)
        request = SimpleNamespace(body=body, request_id="", priority=0)
        await submit(
            SimpleNamespace(engine=engine),
            request,
            SimpleNamespace(remaining=lambda: 3600.0, ask=lambda *_: None),
            None,
            None,
        )
        return weakref.ref(answer)

    async def run():
        held = await call()
        gc.collect()
        return held()

    assert asyncio.run(run()) is None
