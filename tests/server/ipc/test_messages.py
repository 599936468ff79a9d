"""Messages between an HTTP process and an engine arrive whole, in order, with their descriptors, or raise EOFError."""

import os
import socket

import pytest

from flashpoint_server.ipc.bodies import CacheShape, encode
from flashpoint_server.ipc.messages import (
    LARGEST_MESSAGE,
    Attach,
    CacheRecord,
    CallReply,
    Cancel,
    Channel,
    FromEngine,
    JobEvent,
    ToEngine,
)


@pytest.fixture
def ends():
    """Yield the engine's end and the HTTP process's end of a channel."""
    engine, http = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with engine, http:
        yield Channel(engine, ToEngine), Channel(http, FromEngine)


def test_messages_keep_their_order_and_descriptors(ends):
    engine, http = ends
    reader, writer = os.pipe()
    http.send(encode(Attach(7, 4096)), (reader,))
    http.send(encode(Cancel(1)))
    os.close(reader)
    message, (descriptor,) = engine.receive()
    assert message == Attach(7, 4096)
    os.write(writer, b"x")
    assert os.read(descriptor, 2) == b"x"
    os.close(writer)
    os.close(descriptor)
    assert engine.receive() == (Cancel(1), [])
    with pytest.raises(BlockingIOError):
        engine.receive()


def test_a_peer_that_is_gone_or_sends_too_much_is_an_end_of_file(ends):
    engine, http = ends
    engine.send(encode(JobEvent("long", b"x" * LARGEST_MESSAGE)))
    with pytest.raises(EOFError, match="truncated"):
        http.receive()
    engine.close()
    with pytest.raises(EOFError):
        http.receive()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        http.send(encode(Cancel(1)))


@pytest.mark.parametrize(("layers", "count"), [(1, 0), (1, 1), (1, 5000), (512, 40)])
def test_an_answer_about_many_caches_is_sent_in_messages_that_fit(ends, layers, count):
    engine, http = ends
    sizes = (1 << 16,) * layers
    shape = CacheShape(sizes, sizes, sizes, "float8_e4m3fn")
    far = [1 << 40] * layers
    records = [CacheRecord(1 << 50 | n, shape, 1 << 40, far, 1e9, far, far, 1 << 60, 1e9) for n in range(count)]
    received = []
    for part in CallReply.parts(3, records, [], 1.0, 2.0):
        engine.send(encode(part))
        received.append(http.receive()[0])
    assert [record for part in received for record in part.caches] == records
    assert [part.more for part in received] == [True] * (len(received) - 1) + [False]
