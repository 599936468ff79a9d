"""On a GPU (`make gpu-serve`), launches overlap in time, and each has the bits that it has alone."""

import concurrent.futures
import datetime
import itertools

import pytest
import torch

from tests.support.messages import message, post

pytestmark = pytest.mark.gpu


def test_launches_overlap_and_each_has_the_bits_it_has_alone(start_server):
    """Some launch begins before an earlier one ends, because they use separate streams; all answers are equal."""
    server = start_server(batch_bytes=1, log_level="debug")  # 1 byte, so each request has a separate launch
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 16, 4096, 64, generator=generator, dtype=torch.float32).half()
    body = message({"q": q, "k": q, "v": q}, backend="triton", causal=True)
    expected = post(server, "/attention", body, x_request_id="alone").body
    names = [f"beside-{n}" for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: post(server, "/attention", body, x_request_id=name), names))
    assert {answer.body for answer in answers} == {expected}
    assert {answer.headers["x-batch-size"] for answer in answers} == {"1"}

    def times(name):
        """Return (begin, end) of the launch of request `name`, in seconds since the epoch, from the log."""
        begin = server.wait_for_line(lambda line: line["event"] == "begin" and line["request_id"] == name)
        done = server.wait_for_line(lambda line: line["event"] == "request" and line["request_id"] == name)
        begun = datetime.datetime.fromisoformat(begin["timestamp"]).timestamp()
        return begun, begun + done["compute_ms"] / 1000

    spans = sorted(times(name) for name in names)
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans)), spans
