"""After invalid bytes on raw sockets, a real server answers as before.

The tests send the HTTP cases of `make fuzz`, with one seed and fewer random cases.
"""

import asyncio
import contextlib

import psutil
import pytest

from tests.fuzz.http_cases import Case, all_cases, head
from tests.fuzz.http_fuzz import attack
from tests.fuzz.http_server import SETTINGS, Attacked, forward
from tests.support.messages import post
from tests.support.sockets import connect


@pytest.mark.slow
def test_whatever_is_sent_the_server_answers_as_before(start_server):
    attacked = Attacked(start_server(**SETTINGS))
    report = asyncio.run(attack(attacked.port, all_cases(attacked.body, seed=1, count=200), attacked.right))
    assert not report.wrong, report.wrong[:20]
    assert report.cases > 900
    assert report.statuses[200] > 500
    assert {400, 404, 405, 408, 413, 415, 422} <= report.statuses.keys()
    assert not (faults := attacked.faults()), faults[:20]


def test_requests_that_come_faster_than_their_answers_do_not_heap_up(server):
    """If a client sends requests without reading answers, the server stops reading from it after a bounded amount.

    It has stopped if it reads none of the client's bytes while it answers 50 requests of another client.
    """
    body = forward()
    right, flood = post(server, "/attention", body).body, memoryview((head(body) + body) * 100)
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    sent = idle = 0
    with connect(server) as connection, contextlib.suppress(ConnectionError):  # the server may close the connection
        connection.setblocking(False)
        while idle < 50:
            idle += 1
            with contextlib.suppress(BlockingIOError):
                while taken := connection.send(flood[sent % len(flood) :]):
                    sent, idle = sent + taken, 0
                    assert sent < 256 << 20, "the server still reads requests of a client that reads no answers"
            assert server.get("/health/live")[0] == 200
        assert process.memory_info().rss - before < 48 << 20
    assert post(server, "/attention", body).body == right


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n", "500"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", "0 of 1 right"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nright", "half a body"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nright", "two"),
        (b"HTTP/1.1 200 OK\r\n\r\nright", "no length"),
        (b"hello", "within a head"),
        (b"", "0 of 1 right"),
    ],
)
def test_an_answer_that_is_wrong_is_seen(answer, message):
    async def answers(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run():
        async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await attack(port, [Case("one", (head(b""),), exact=1)], b"right")

    report = asyncio.run(run())
    assert any(message in line for line in report.wrong), report.wrong
