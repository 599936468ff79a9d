"""An engine disconnects an HTTP process that reads no messages."""

import select
import socket

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_server.engine.scheduling import engine_request
from flashpoint_server.engine.scheduling.engine_request import Worker
from flashpoint_server.ipc.messages import Cancel, Channel, FromEngine, ToEngine, Unmapped


def received(channel):
    """Return all messages that have arrived."""
    messages = []
    while True:
        try:
            messages.append(channel.receive()[0])
        except BlockingIOError:
            return messages


def test_a_peer_that_reads_nothing_is_dropped_and_told_only_when_its_memory_is_free(monkeypatch):
    monkeypatch.setattr(engine_request, "PATIENCE", 0.0)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs, ours = Channel(pair[0], FromEngine), Channel(pair[1], ToEngine)
    theirs.send(Cancel(7))
    peer = Worker(ours, pinning=None)
    while not peer.not_reading:
        peer.send(Unmapped(0))
    assert ours.receive() == (Cancel(7), [])
    assert select.select([ours], [], [], 240)[0]
    with pytest.raises(EOFError):  # by which the engine's loop knows that it must remove the process
        ours.receive()
    assert set(received(theirs)) == {Unmapped(0)}  # no end of file yet: the engine still uses the process's memory
    peer.close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
