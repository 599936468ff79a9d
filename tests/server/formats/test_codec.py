"""Calls of the JSON process end correctly if deadlines pass, callers leave, it dies or hangs, or resources run out."""

import asyncio
import contextlib
import os
import resource
import signal
import time

import numpy as np
import psutil
import pytest
import uvloop

from flashpoint_contract.schemas import jsonwire
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import SMALL, Codec, Codecs
from flashpoint_server.http.body import RequestBody
from flashpoint_server.ipc.staging import Pool, PoolFullError
from flashpoint_server.refusal import Refusal
from tests.support.held import hold

TEXT = jsonwire.encode({"q": np.ones((2, 2), np.float32)}, {})
PATIENCE = 240  # seconds; a longer wait is a hang
BRIEFLY = 0.05  # seconds; a deadline so soon that it passes while the JSON process is blocked


@contextlib.contextmanager
def no_descriptors():
    """Prevent this process from opening files inside the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd")[:-1])  # the last descriptor belongs to listdir
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)


@contextlib.contextmanager
def no_memory(more):
    """Limit the address space of this process inside the block to `more` bytes over the present size."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Held:
    """A call that blocks the JSON process until `release` is called."""

    def __init__(self, folder):
        self.folder = folder

    def call(self, codec, deadline=None):
        for name in ("begun", "released"):
            (self.folder / name).unlink(missing_ok=True)
        return codec.run(deadline, hold, str(self.folder))

    async def begun(self):
        await until((self.folder / "begun").exists)

    def release(self):
        (self.folder / "released").touch()


@pytest.fixture
def blocked(tmp_path):
    return Held(tmp_path)


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # another process's state: there is no event to wait for
            await asyncio.sleep(0.005)


async def works(codec, deadline=None):
    arrays, _ = await codec.run(deadline, jsonwire.decode, TEXT)
    assert arrays["q"].tolist() == [[1, 1], [1, 1]]


def run(calls):
    """Run the coroutine function `calls` with a new codec, in uvloop, as in the service."""

    async def main():
        codec = Codec()
        try:
            await calls(codec)
        finally:
            codec.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def refused(code):
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


def test_nobody_waits_for_json_beyond_the_deadline(blocked):
    async def calls(codec):
        other = asyncio.ensure_future(blocked.call(codec))
        await blocked.begun()
        with refused("deadline_exceeded"):
            await codec.run(time.monotonic() + BRIEFLY, jsonwire.decode, TEXT)
        assert not other.done()
        blocked.release()
        await other
        await works(codec, time.monotonic() + PATIENCE)

    run(calls)


def test_a_call_whose_deadline_has_passed_starts_no_process():
    before = set(psutil.Process().children())

    async def calls(codec):
        with refused("deadline_exceeded"):
            await codec.run(time.monotonic() - 1, jsonwire.decode, TEXT)
        assert set(psutil.Process().children()) <= before

    run(calls)


def test_who_gives_a_call_up_costs_the_next_no_process(blocked, monkeypatch):
    """After a caller cancels a call or its deadline passes, the same JSON process answers the next call."""

    monkeypatch.setattr("flashpoint_server.formats.codec.ABANDONED_SECONDS", PATIENCE)

    async def calls(codec):
        process = await codec.run(None, os.getpid)
        with refused("deadline_exceeded"):
            await blocked.call(codec, time.monotonic() + BRIEFLY)
        following = asyncio.ensure_future(works(codec))
        blocked.release()
        await following
        cancelled = asyncio.ensure_future(blocked.call(codec))
        await blocked.begun()
        cancelled.cancel()
        following = asyncio.ensure_future(codec.run(None, os.getpid))
        blocked.release()
        assert await following == process

    run(calls)


def test_a_call_that_nobody_waits_for_is_ended_and_one_that_has_not_begun_never_runs(blocked, tmp_path, monkeypatch):
    monkeypatch.setattr("flashpoint_server.formats.codec.ABANDONED_SECONDS", BRIEFLY)

    async def calls(codec):
        process = await codec.run(None, os.getpid)
        endless = asyncio.ensure_future(blocked.call(codec))
        await blocked.begun()
        waiting = [asyncio.ensure_future(codec.run(None, os.mkdir, str(tmp_path / f"made-{n}"))) for n in range(50)]
        await asyncio.sleep(0)
        for call in (*waiting, endless):
            call.cancel()
        assert await codec.run(None, os.getpid) != process
        assert not [*tmp_path.glob("made-*")]

    run(calls)


def test_a_small_text_waits_for_no_large_one_and_neither_for_a_plot(tmp_path):
    """Each kind of work has a process of its own."""
    gates = [Held(tmp_path / name) for name in ("large", "plot")]

    async def calls():
        codecs, body = Codecs(), RequestBody({}, None, {"content-length": "1"}, Settings())
        try:
            for gate, codec in zip(gates, (codecs.large, codecs.plots), strict=True):
                gate.folder.mkdir()
                held = asyncio.ensure_future(gate.call(codec))
                await gate.begun()
                assert not held.done()
            arrays, _ = await codecs.run(body, jsonwire.decode, TEXT)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
            large = asyncio.ensure_future(codecs.run(body, len, bytes(SMALL + 1)))
            written = {"o": np.zeros(SMALL, np.float32)}
            larger = asyncio.ensure_future(codecs.run(body, jsonwire.encode, written, {}))
            assert await codecs.run(body, len, bytes(SMALL)) == SMALL
            assert not large.done()
            assert not larger.done()
            gates[0].release()
            assert await large == SMALL + 1
            assert len(await larger) > SMALL
            assert len({*codecs.pids().values()}) == 3
        finally:
            codecs.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(calls())


@pytest.mark.parametrize(
    ("patience", "code"), [(None, "engine_lost"), pytest.param(BRIEFLY, "deadline_exceeded", marks=pytest.mark.slow)]
)
def test_a_process_that_hangs_is_ended_and_the_next_call_has_another(monkeypatch, patience, code):
    async def calls(codec):
        process = await codec.run(None, os.getpid)
        os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr("flashpoint_server.formats.codec.HANG_SECONDS", 2 * BRIEFLY)
        with refused(code):
            await codec.run(None if patience is None else time.monotonic() + patience, jsonwire.decode, TEXT)
        await until(lambda: not psutil.pid_exists(process))
        monkeypatch.setattr("flashpoint_server.formats.codec.HANG_SECONDS", PATIENCE)
        await works(codec)

    run(calls)


def test_closing_refuses_the_call_that_is_made(blocked):
    before = set(psutil.Process().children())

    async def calls(codec):
        call = asyncio.ensure_future(blocked.call(codec))
        await blocked.begun()
        codec.close()
        with refused("draining"):
            await call
        await until(lambda: set(psutil.Process().children()) <= before)

    run(calls)


def test_a_call_whose_process_is_killed_is_refused_and_the_next_is_not(blocked):
    async def calls(codec):
        process = await codec.run(None, os.getpid)
        call = asyncio.ensure_future(blocked.call(codec))
        await blocked.begun()
        os.kill(process, signal.SIGKILL)
        with refused("engine_lost"):
            await call
        await works(codec)
        await until(lambda: not psutil.pid_exists(process))

    run(calls)


def test_where_no_process_can_be_started_json_is_refused_until_one_can():
    async def calls(codec):
        with no_descriptors(), refused("out_of_memory"):
            await codec.run(None, jsonwire.decode, TEXT)
        await works(codec)

    run(calls)


@pytest.mark.parametrize("mib", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_a_process_that_starts_when_memory_is_scarce_leaves_nobody_waiting(mib):
    async def calls(codec):
        with no_memory(mib << 20), contextlib.suppress(Refusal, MemoryError):
            await codec.run(time.monotonic() + PATIENCE, jsonwire.decode, TEXT)
        await works(codec, time.monotonic() + PATIENCE)

    run(calls)


def test_where_no_segment_can_be_made_the_pool_is_full_until_one_can():
    pool = Pool(64 << 20)
    try:
        with no_descriptors(), pytest.raises(PoolFullError, match="Too many open files"):
            pool.take(1)
        pool.take(1).release()
    finally:
        pool.close()
