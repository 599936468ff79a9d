"""The calculator's rates, measured at a real server, and a prediction from them."""

import math
import statistics
import time

import numpy as np

import flashpoint
from flashpoint import capacity

# A wrong unit or a forgotten term is farther off than this, and a busy machine between two measurements is not.
FACTOR = 6.0


def test_a_prediction_is_of_the_order_of_what_a_call_takes(server):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 1536, 64), dtype=np.float32)
    with flashpoint.Client(server.url) as client:
        rates = capacity.measure(client, shared=True)
        assert all(
            0 < rate < math.inf for rate in (rates.call, rates.upload, rates.download, rates.flops, rates.memory)
        )
        predicted = capacity.predict(capacity.need(flashpoint.Shape(q_heads=8, q_len=1536, head_dim=64)), rates)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            client.attention(q, k, v)
            took.append(time.perf_counter() - began)
    assert 1 / FACTOR < statistics.median(took) / predicted.seconds < FACTOR
