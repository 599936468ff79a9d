"""`flashpoint.capacity`: bytes and FLOPs equal counts by the definition, and times follow from the rates."""

import math
from dataclasses import replace

import numpy as np
import pytest

import flashpoint
from flashpoint import capacity
from flashpoint.capacity import Rates, need, predict

SHAPE = flashpoint.Shape(batch=2, q_heads=6, kv_heads=2, q_len=30, kv_len=50, head_dim=16, value_dim=8)
RATES = Rates(call=0.5, upload=1e4, download=1e5, flops=1e6, grad_flops=5e5, pcie=1e6, round_trip=0.25)


def tensors(kind):
    q, o = np.zeros((2, 6, 30, 16), kind), np.zeros((2, 6, 30, 8), kind)
    k, v = np.zeros((2, 2, 50, 16), kind), np.zeros((2, 2, 50, 8), kind)
    return q, k, v, o, np.zeros((2, 6, 30), np.float32)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bytes_are_those_of_the_tensors(dtype):
    q, k, v, o, lse = (t.nbytes for t in tensors(dtype))
    forward = need(SHAPE, dtype=dtype)
    assert (forward.upload, forward.download, forward.keys) == (q + k + v, o, k + v)
    backward = need(SHAPE, dtype=dtype, side="backward")
    assert (backward.upload, backward.download) == (q + k + v + o + o + lse, q + k + v)
    assert need(SHAPE, dtype=dtype, side="backward", with_forward=False).upload == q + k + v + o
    cut = need(SHAPE, dtype=dtype, parts=(2, 3))
    assert (cut.upload, cut.download) == (3 * q + 2 * (k + v), 3 * o)


def test_a_call_over_caches_sends_its_own_tokens_and_reads_all():
    q, k, v, o, _ = tensors("float32")
    decode = need(SHAPE, cached=True)
    token_bytes = (k.nbytes + v.nbytes) * 30 // 50
    assert (decode.upload, decode.download, decode.keys) == (q.nbytes + token_bytes, o.nbytes, k.nbytes + v.nbytes)
    assert decode.flops == need(SHAPE).flops


@pytest.mark.parametrize(("tokens", "taken"), [(1, 16), (16, 16), (17, 32), (1000, 1024), (1024, 1024), (2100, 2112)])
def test_a_cache_takes_whole_chunks_and_the_last_by_doubling(tokens, taken):
    shape = flashpoint.Shape(q_heads=8, kv_heads=2, q_len=1, kv_len=tokens, head_dim=16, value_dim=8)
    assert capacity.cache_bytes(shape, dtype="float16", layers=3) == 3 * taken * 2 * (16 + 8) * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"side": "backward"}, "cached"), ({"parts": (1, 2)}, "cached"), ({"shape": {"kv_len": 4}}, "kv_len")],
)
def test_what_caches_do_not_go_with(wrong, message):
    shape = flashpoint.Shape(**{"q_len": 8, "kv_len": 16, "head_dim": 8} | wrong.pop("shape", {}))
    with pytest.raises(flashpoint.InvalidInputError, match=message):
        need(shape, cached=True, **wrong)


@pytest.mark.parametrize("causal", [False, True])
def test_operations_are_those_of_the_pairs_that_are_seen(causal):
    i, j = np.arange(30)[:, None], np.arange(50)
    pairs = int(((j <= i + 20) | (not causal)).sum()) * 2 * 6
    assert need(SHAPE, causal=causal).flops == pairs * (2 * 16 + 2 * 8)  # q·kᵀ, p·v
    gradient = need(SHAPE, causal=causal, side="backward").flops
    assert gradient == pairs * 2 * (3 * 16 + 2 * 8)  # q·kᵀ, do·vᵀ, dq, dk, dv
    alone = need(SHAPE, causal=causal, side="backward", with_forward=False).flops
    assert alone == gradient + need(SHAPE, causal=causal).flops


def test_a_request_takes_the_sum_and_a_server_gives_what_the_slowest_stage_lets_pass():
    request = need(SHAPE)
    prediction = predict(request, RATES)
    assert prediction.stages == {
        "round trip": 0.25,
        "call": 0.5,
        "upload": request.upload / 1e4,
        "to device": request.upload / 1e6,
        "compute": request.flops / 1e6,
        "from device": request.download / 1e6,
        "download": request.download / 1e5,
    }
    assert prediction.seconds == pytest.approx(sum(prediction.stages.values()))
    assert prediction.bottleneck == "upload"
    assert prediction.requests_per_second == pytest.approx(1e4 / request.upload)
    assert prediction.for_load(1) == {
        "http process": 1,
        "link": math.ceil(request.upload / 1e4),
        "device": math.ceil(request.flops / 1e6),
    }
    same_cores = predict(request, Rates(call=0.5, upload=1e4, download=1e5, flops=1e6, grad_flops=5e5, shared=True))
    assert same_cores.requests_per_second == pytest.approx(1 / same_cores.seconds)


def test_what_reads_more_than_it_computes_takes_as_long_as_reading():
    one = flashpoint.Shape(q_len=1, kv_len=1000, head_dim=16)
    rates = Rates(call=0, upload=1, download=1, flops=1e9, grad_flops=1e9, memory=1e6)
    assert predict(need(one), rates).stages["compute"] == pytest.approx(2 * 1000 * 16 * 4 / 1e6)


def test_a_round_trip_delays_a_request_and_stops_no_other():
    near, far = (
        Rates(call=0.1, round_trip=way, upload=1e9, download=1e9, flops=1e9, grad_flops=1e9) for way in (0.0, 5.0)
    )
    near, far = predict(need(SHAPE), near), predict(need(SHAPE), far)
    assert far.seconds == pytest.approx(near.seconds + 5)
    assert far.requests_per_second == near.requests_per_second
    assert far.bottleneck == near.bottleneck == "call"


def test_servers_share_the_device_and_not_the_link():
    request = need(SHAPE)
    one, four = predict(request, RATES), predict(request, RATES, servers=4)
    assert four.stages["compute"] == one.stages["compute"] / 4
    assert four.stages["upload"] == one.stages["upload"]


def test_a_side_is_one_of_two():
    with pytest.raises(flashpoint.InvalidInputError, match="side"):
        need(SHAPE, side="both")


def test_a_way_too_fast_to_be_measured_takes_no_time():
    """A rate is inf if noise makes the measured time (that of large calls minus that of small calls) negative."""
    assert capacity._rate(1 << 20, -0.001) == math.inf
    prediction = predict(need(SHAPE), replace(RATES, upload=math.inf, download=math.inf))
    assert prediction.stages["upload"] == prediction.stages["download"] == 0
    assert math.isfinite(prediction.seconds)
