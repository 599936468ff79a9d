"""An engine disconnects an HTTP process that reads no messages, and keeps the plans of its calls."""

import mmap
import select
import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.options import Options
from flashpoint_server.engine.scheduling import engine_request
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, Worker
from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor, PlannedCall, encode
from flashpoint_server.ipc.messages import Cancel, Channel, FromEngine, Submit, ToEngine, Unmapped


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
    theirs.send(encode(Cancel(7)))
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


def planned(places, **options):
    """Return the body of a forward with q, k, v and o, each at (segment, offset) in `places`."""
    q, k, v, o = (PlacedTensor(n, "float32", (1, 1, 4, 8), *places[n]) for n in "qkvo")
    return encode(PlannedCall("forward", Options(**options), "cpu", (q, k, v), (o,)))


def test_calls_of_a_plan_share_it_and_each_slot_keeps_its_parts_until_a_segment_is_unmapped():
    segments = {number: mmap.mmap(-1, 4096) for number in range(3)}
    peer = Worker(channel=None, pinning=SimpleNamespace(unpin=lambda memory: None), segments=segments)
    cuts = []

    def ask(body, segment, start):
        """Return a request, which has parts: those kept for its slot, or new ones."""
        submit = Submit(
            id=0, request_id="r", body=body, segment=segment, start=start, mark=0, flops=1, seconds=0.1, rank=0.0
        )  # fmt: skip
        request = EngineRequest.of(submit, peer, lambda backend: True)

        def parts_of(request):
            cuts.append(request)
            return [SimpleNamespace(rows=request.spec.rows({}), first_head=0, seed=None)]

        request.cut(parts_of, Budget(1, 1, 0.0))
        return request, request.parts[0]

    slot = {name: (SLOT, 128 * n) for n, name in enumerate("qkvo")}
    in_region = {**slot, "o": (2, 0)}
    requests = [
        ask(planned(places), segment, start)
        for places, segment, start in ((slot, 0, 0), (slot, 0, 1024), (slot, 1, 0), (in_region, 1, 0))
    ]
    first, beside, other, elsewhere = requests
    assert first[0].planned is beside[0].planned is other[0].planned is not elsewhere[0].planned
    assert len(cuts) == 4
    assert ask(planned(slot), 0, 1024)[1] is beside[1]
    assert ask(planned(slot, dropout_p=0.5), 0, 0)[1] is not ask(planned(slot, dropout_p=0.5), 0, 0)[1]
    del cuts[:]
    peer.detach(0)
    assert {segment for _, segment, _ in peer.placed} == {1}
    assert ask(planned(slot), 1, 0)[1] is other[1]
    assert ask(planned(in_region), 1, 0)[1] is elsewhere[1]
    peer.detach(2)
    assert (ask(planned(slot), 1, 0)[1] is other[1], ask(planned(in_region), 1, 0)[1] is elsewhere[1]) == (True, False)
    assert not ask(planned(in_region), 1, 0)[0].mapped
