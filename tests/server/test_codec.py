"""The process that reads and writes JSON: no later than the deadline, and refused where the system has none to give."""

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

from flashpoint import jsonwire
from flashpoint_server.codec import Codec
from flashpoint_server.memory import Pool, PoolFullError
from flashpoint_server.refusal import Refusal

TEXT = jsonwire.encode({"q": np.ones((2, 2), np.float32)}, {})
LONG = jsonwire.encode({"q": np.ones((1 << 9, 1 << 9), np.float32)}, {})  # a quarter of a million numbers


@contextlib.contextmanager
def no_descriptors():
    """None beyond those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd")[:-1])  # the last one is that of the listing
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
    """No address space but `more` bytes beyond what is mapped."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(coroutine):
    """As the service does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def refused(code):
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


def test_nobody_waits_for_json_beyond_the_deadline():
    async def calls():
        codec = Codec()
        try:
            await codec.decode(TEXT, None)
            began = time.monotonic()
            long = asyncio.ensure_future(codec.decode(LONG, None))
            with refused("deadline_exceeded"):
                await codec.decode(LONG, began + 0.02)  # behind the other, whose numbers take longer than that
            took = time.monotonic() - began
            await long
            assert took < time.monotonic() - began
            arrays, _ = await codec.decode(TEXT, time.monotonic() + 60)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()

    run(calls())


def test_what_is_late_already_is_not_begun():
    before = set(psutil.Process().children())

    async def calls():
        codec = Codec()
        try:
            with refused("deadline_exceeded"):
                await codec.decode(TEXT, time.monotonic() - 1)
            assert set(psutil.Process().children()) == before
        finally:
            codec.close()

    run(calls())


def test_the_call_after_one_that_was_given_up_gets_its_own_answer():
    async def calls():
        codec = Codec()
        try:
            await codec.decode(TEXT, None)
            for _ in range(3):
                with refused("deadline_exceeded"):
                    await codec.decode(LONG, time.monotonic() + 0.02)  # its own numbers take longer than that
                arrays, _ = await codec.decode(TEXT, None)
                assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()

    run(calls())


def test_who_gives_a_call_up_costs_the_next_no_process():
    """To start one takes longer than most calls: where each late call cost one, the next was late, too, and so on."""

    async def calls():
        codec = Codec()
        try:
            process = await codec.run(None, os.getpid)
            for _ in range(3):
                with refused("deadline_exceeded"):
                    await codec.decode(LONG, time.monotonic() + 0.02)
                given_up = asyncio.ensure_future(codec.decode(LONG, None))
                await asyncio.sleep(0.02)
                given_up.cancel()
            assert await codec.run(None, os.getpid) == process
        finally:
            codec.close()

    run(calls())


@pytest.mark.parametrize(("patience", "code"), [(None, "engine_lost"), (0.02, "deadline_exceeded")])
def test_a_process_that_hangs_is_ended_and_the_next_call_has_another(monkeypatch, patience, code):
    monkeypatch.setattr("flashpoint_server.codec.HANG_SECONDS", 1.0)

    async def calls():
        codec = Codec()
        try:
            process = await codec.run(None, os.getpid)
            os.kill(process, signal.SIGSTOP)
            with refused(code):
                await codec.decode(TEXT, None if patience is None else time.monotonic() + patience)
            arrays, _ = await codec.decode(TEXT, None)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
            assert not psutil.pid_exists(process)
        finally:
            codec.close()

    run(calls())


def test_closing_refuses_the_call_that_is_made():
    before = set(psutil.Process().children())

    async def calls():
        codec = Codec()
        await codec.decode(TEXT, None)
        long = asyncio.ensure_future(codec.decode(LONG, None))
        await asyncio.sleep(0.01)
        codec.close()
        with refused("draining"):
            await long
        assert set(psutil.Process().children()) == before

    run(calls())


def test_a_call_whose_process_is_killed_is_refused_and_the_next_is_not():
    before = set(psutil.Process().children())

    async def calls():
        codec = Codec()
        try:
            await codec.decode(TEXT, None)
            (process,) = set(psutil.Process().children()) - before
            long = asyncio.ensure_future(codec.decode(LONG, None))
            await asyncio.sleep(0)
            process.kill()
            with refused("engine_lost"):
                await long
            arrays, _ = await codec.decode(TEXT, None)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()
        assert process not in psutil.Process().children()

    run(calls())


def test_where_no_process_can_be_started_json_is_refused_until_one_can():
    async def calls():
        codec = Codec()
        try:
            with no_descriptors(), refused("out_of_memory"):
                await codec.decode(TEXT, None)
            arrays, _ = await codec.decode(TEXT, None)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()

    run(calls())


@pytest.mark.parametrize("mib", [0, 1, 8])
def test_a_process_that_starts_when_memory_is_scarce_leaves_nobody_waiting(mib):
    async def calls():
        codec = Codec()
        try:
            with no_memory(mib << 20), contextlib.suppress(Refusal, MemoryError):
                await codec.decode(TEXT, time.monotonic() + 30)
            arrays, _ = await codec.decode(TEXT, time.monotonic() + 30)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()

    run(calls())


def test_where_no_segment_can_be_made_the_pool_is_full_until_one_can():
    pool = Pool(64 << 20)
    try:
        with no_descriptors(), pytest.raises(PoolFullError, match="Too many open files"):
            pool.take(1)
        pool.take(1).release()
    finally:
        pool.close()
