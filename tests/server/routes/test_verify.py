"""/verify judges a backend or the caller's outputs, sends progress events, and stops at deadlines and cancellation."""

import itertools
import json
import re

import psutil
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.messages import JSON, SAFETENSORS, message, normal, post, problem
from tests.support.sockets import send

SHAPE = {"q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 40, "head_dim": 16}


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_a_drawn_problem_is_judged(client, backend):
    sharp = {"extras": ["sinks"], "dtype": "bfloat16"} if backend != "cpu" else {}
    report = client.verify(shape=SHAPE, causal=True, backend=backend, seed=3, **sharp)
    assert report.ok, report
    assert (report.backend, report.seed) == (backend, 3)
    assert [tensor.name for tensor in report.tensors] == ["o", "lse", "dq", "dk", "dv"]
    assert all(tensor.max_abs <= tensor.bound for tensor in report.tensors)
    assert all(sum(decade.count for decade in t.histogram) > 0 for t in report.tensors)


def test_a_verification_tells_how_far_it_is(client):
    results = []
    report = client.verify(shape=SHAPE, seed=3, progress=results.append)
    assert report.tensors == client.verify(shape=SHAPE, seed=3).tensors
    assert (results[0].done, results[0].stage, results[0].direction) == (0, "backend", "forward")
    assert {at.total for at in results} == {6}  # forward and backward, of the backend, float64 and torch
    assert all(a.done < b.done for a, b in itertools.pairwise(results))


def test_the_events_of_a_verification_are_asked_for_by_name(server, tensors):
    """Only if Accept prefers text/event-stream is the answer a stream of events. An invalid request gets 422 anyway."""
    drawn = json.dumps({"shape": SHAPE}).encode()
    for accept in ("*/*", "text/event-stream;q=0.5, application/json", "text/event-stream;q=0"):
        assert post(server, "/verify", drawn, JSON, accept=accept).headers["content-type"] == JSON, accept
    inputs = message({name: tensors[name] for name in "qkv"})
    for body, media in ((drawn, JSON), (inputs, SAFETENSORS)):
        answer = post(server, "/verify", body, media, accept="application/json;q=0.5, text/event-stream")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        kinds = re.findall(rb"^event: (\w+)$", answer.body, re.MULTILINE)
        assert (set(kinds[:-1]), kinds[-1]) == ({b"progress"}, b"report")
    refused = json.dumps({"shape": SHAPE, "backend": "cpu", "dtype": "float64"}).encode()
    problem(post(server, "/verify", refused, JSON, accept="text/event-stream"), 422, "invalid_request")


def test_a_verification_that_nobody_waits_for_ends_between_two_blocks(gated):
    """If the client of a running verification disconnects, no further block starts, and another verification can run.

    A block is one call of the backend, or some queries of all heads of a sequence.
    """
    name = "step-left"
    drawn = json.dumps({"shape": SHAPE}).encode()
    gated.gate("step").unlink(missing_ok=True)
    tensors = message({name: normal(1, 2, 48, 16, seed=seed) for seed, name in enumerate("qkv")})
    with send(gated.server, tensors, path="/verify", request_id=name):
        gated.wait_held(name)
    gated.wait_stopped(name)
    gated.gate("step").touch()
    assert post(gated.server, "/verify", drawn, JSON).json["ok"]
    assert gated.blocks(name) == [0, 1, 2]


def test_a_deadline_that_passes_behind_the_first_event_ends_the_stream_with_a_problem(gated):
    drawn = json.dumps({"shape": SHAPE}).encode()
    for doubling in range(8):  # double the deadline until the first event comes before it
        name = f"step-late-{doubling}"
        gated.gate("step").unlink(missing_ok=True)
        try:
            headers = {"accept": "text/event-stream", "x_request_id": name, "x_timeout_ms": 1000 << doubling}
            answer = post(gated.server, "/verify", drawn, JSON, **headers)
        finally:
            gated.gate("step").touch()
        if answer.status == 200:
            break
        problem(answer, 504, "deadline_exceeded")
    events = [json.loads(data) for data in re.findall(rb"^data: (.*)$", answer.body, re.MULTILINE)]
    assert events[-1]["problem"]["code"] == "deadline_exceeded"
    assert (answer.status, events[-1]["kind"], {e["kind"] for e in events[:-1]}) == (200, "problem", {"progress"})
    line = gated.server.wait_for_request(name)
    assert (line["status"], line["code"]) == (200, "deadline_exceeded")


def sdpa(q, k, v, do, **how):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, **how)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.fixture(scope="module")
def tensors():
    return {name: normal(1, 2, 48, 16, seed=seed) for seed, name in enumerate(("q", "k", "v", "do"))}


def test_the_callers_own_outputs_are_judged_and_torchs_pass(client, tensors):
    o, dq, dk, dv = sdpa(**tensors, is_causal=True)
    report = client.verify(**tensors, causal=True, o=o, dq=dq, dk=dk, dv=dv)
    assert report.ok
    assert (report.backend, [t.name for t in report.tensors]) == ("given", ["o", "dq", "dk", "dv"])


def test_one_element_off_is_found(client, tensors):
    o, *_ = sdpa(**tensors)
    o[0, 1, 17, 5] += 1e-2
    report = client.verify(tensors["q"], tensors["k"], tensors["v"], o=o)
    (judged,) = report.tensors
    assert not report.ok
    assert judged.worst_index == (0, 1, 17, 5)
    assert judged.max_abs == pytest.approx(1e-2, rel=1e-3)
    assert judged.worst_value - judged.worst_expected == pytest.approx(1e-2, rel=1e-3)
    assert judged.where == "1 of 1536 elements; head 1 (the last) of 2; row 17 of 48; column 5 of 16"
    assert judged.excess > 100
    assert report.causes == ()


@pytest.mark.parametrize("wrong", ["alignment", "scale"])
def test_wrong_kernels_are_caught(client, wrong):
    q, k, v = (normal(1, 2, n, 16, seed=n) for n in (20, 32, 33))
    k, v = k[:, :, :32], v[:, :, :32]
    top_left = torch.ones(20, 32, dtype=torch.bool).tril()
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=top_left if wrong == "alignment" else top_left.new_ones(20, 32).tril(12),
        scale=1.0 if wrong == "scale" else None,
    )  # fmt: skip
    report = client.verify(q, k, v, causal=True, o=o)
    assert not report.ok
    assert report.causes[0].code == {"alignment": "causal-alignment", "scale": "scale-missing"}[wrong]
    assert report.causes[0].confirmed


def test_a_stranger_may_verify_in_either_encoding(server, tensors):
    q, k, v = (tensors[name] for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    binary = post(server, "/verify", message({"q": q, "k": k, "v": v, "o": o}))
    assert binary.headers["content-type"] == JSON
    lists = {name: t.tolist() for name, t in {"q": q, "k": k, "v": v, "o": o}.items()}
    assert post(server, "/verify", json.dumps(lists).encode(), JSON).json["ok"] is binary.json["ok"] is True


def test_what_cannot_be_verified_names_the_field(server, tensors):
    def refused(document, code, status=422):
        binary = isinstance(document, bytes)
        body, media = (document, SAFETENSORS) if binary else (json.dumps(document).encode(), JSON)
        return problem(post(server, "/verify", body, media), status, code)

    assert refused({"shape": {**SHAPE, "kv_heads": 3}}, "invalid_request")["errors"][0]["loc"] == ["shape"]
    assert refused({"shape": SHAPE, "backend": "triton"}, "invalid_request")["errors"][0]["loc"] == ["backend"]
    qkv = {name: tensors[name] for name in "qkv"}
    wrong = refused(message(qkv | {"o": tensors["q"][:, :, :3]}), "invalid_request")
    assert wrong["errors"][0]["loc"] == ["o"]
    assert refused(message(qkv | {"p": tensors["q"]}), "invalid_request")["errors"][0]["loc"] == ["p"]
    big = {"shape": {"q_heads": 16, "q_len": 8192, "head_dim": 64}}
    detail = refused(big, "work_too_large", 413)["detail"]
    assert re.fullmatch(
        r"the verification needs [\d.]+ TFLOP, over the limit of 275 GFLOP; lengths of up to \d+ fit", detail
    )


@pytest.mark.parametrize("sizes", [{"q_len": 100_000}, {"q_len": 4, "kv_len": 1 << 30}])
def test_a_verification_that_is_too_large_is_told_the_largest_length_that_fits(server, sizes):
    """The length that the refusal names is not too large, and the next one is, also if only the keys are many."""

    def ask_for(**sizes):
        document = {"shape": {"q_heads": 8, "head_dim": 64, **sizes}, "causal": True}
        return post(server, "/verify", json.dumps(document).encode(), JSON, x_timeout_ms=1)

    detail = problem(ask_for(**sizes), 413, "work_too_large")["detail"]
    length = int(re.search(r"; lengths of up to (\d+) fit$", detail)[1])
    shorter, next_one = ({name: min(n, most) for name, n in sizes.items()} for most in (length, length + 1))
    problem(ask_for(**shorter), 504, "deadline_exceeded")  # it would run, if it had the time
    problem(ask_for(**next_one), 413, "work_too_large")
    detail = problem(ask_for(**sizes, batch=1 << 17), 413, "work_too_large")["detail"]
    assert detail.endswith("; no length fits: take fewer sequences or heads, or smaller head dimensions")


def test_a_verification_needs_eight_times_the_memory_of_its_tensors(server):
    """k and v are a quarter of the memory."""
    heads = -(-psutil.virtual_memory().total // (4 * 2 * 4 * 256 << 16))
    wide = {"q_heads": heads, "q_len": 1, "kv_len": 1 << 16, "head_dim": 256}
    text = json.dumps({"shape": wide, "direction": "forward"}).encode()
    answer = post(server, "/verify", text, JSON, x_timeout_ms=1)  # so that nothing runs if it is admitted
    assert ", and the device has " in problem(answer, 413, "work_too_large")["detail"]
