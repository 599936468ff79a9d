"""The capacity calculator measures rates and predicts times rightly, with a real server and a simulated clock."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import flashpoint
from flashpoint import capacity

RATES = {"call": 2e-3, "upload": 1e9, "download": 5e8, "flops": 1e11, "grad_flops": 5e10, "memory": 2e10}


class Clock:
    """A replacement for the module `time` that stands still unless a test advances `now`."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Timed(flashpoint.Client):
    """A client that advances the clock by the time that each of its calls would take at RATES."""

    def __init__(self, url, clock):
        super().__init__(url)
        self._clock = clock

    def attention(self, q, k, v, **options):
        result = super().attention(q, k, v, **options)
        (queries,), (keys,) = options.get("q_lengths", q.shape[2:3]), options.get("kv_lengths", k.shape[2:3])
        products = 2 * q.shape[1] * queries * keys * (q.shape[3] + v.shape[3])
        read = k.shape[1] * keys * (k.shape[3] + v.shape[3]) * k.itemsize
        seconds = max(products / RATES["flops"], read / RATES["memory"])
        return self._move_on(result, (q, k, v), seconds)

    def attention_grad(self, do, q, k, v, *, o, lse, **options):
        result = super().attention_grad(do, q, k, v, o=o, lse=lse, **options)
        products = 2 * q.shape[1] * q.shape[2] * k.shape[2] * (3 * q.shape[3] + 2 * v.shape[3])
        return self._move_on(result, (do, q, k, v, o, lse), products / RATES["grad_flops"])

    def _move_on(self, result, sent, compute):
        answer, meta = result if isinstance(result[-1], flashpoint.Meta) else (result, None)
        received = answer if isinstance(answer, tuple) else (answer,)
        if meta is not None:
            meta.timings["compute"] = 1000 * compute
        self._clock.now += RATES["call"] + compute
        self._clock.now += sum(t.nbytes for t in sent) / RATES["upload"]
        self._clock.now += sum(t.nbytes for t in received) / RATES["download"]
        return result


@pytest.mark.slow
def test_the_rates_are_those_of_the_server_and_predict_what_a_call_takes(server, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(capacity, "time", clock)
    monkeypatch.setattr(capacity, "REPEATS", 1)
    with Timed(server.url, clock) as client:
        rates = capacity.measure(client, shared=True)
        assert {name: getattr(rates, name) for name in RATES} == pytest.approx(RATES, rel=0.02)
        assert rates.shared
        predicted = capacity.predict(capacity.need(flashpoint.Shape(q_heads=8, q_len=256, head_dim=64)), rates)
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 256, 64), dtype=np.float32)
        before = clock.now
        client.attention(q, k, v)
        assert clock.now - before == pytest.approx(predicted.seconds, rel=0.02)


def test_a_cache_takes_the_memory_that_the_calculator_says(server):
    shape = flashpoint.Shape(q_heads=8, q_len=1, kv_len=1500, head_dim=64)
    k = np.zeros((1, 8, 1500, 64), np.float32)
    with flashpoint.Client(server.url) as client, client.cache(layers=2, kv_heads=8, head_dim=64) as cache:
        for layer in range(2):
            cache.append(k, k, layer=layer)
        cache.refresh()
        assert cache.bytes == pytest.approx(capacity.cache_bytes(shape, layers=2), rel=1e-3)
