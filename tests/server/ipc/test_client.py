"""An HTTP process and an engine process: the order of jobs, cancellation, a process's death, closing, and memory."""

import asyncio
import os
import signal
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest

from flashpoint_contract.options import Options
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.access.admission import FREE
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc import client as engine
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor, PlannedCall, encode
from flashpoint_server.ipc.client import Engine, Engines, State
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import Submit
from flashpoint_server.ipc.staging import Layout, Pool
from flashpoint_server.observability.metrics import Metrics
from flashpoint_server.processes.processes import running_engines
from flashpoint_server.refusal import Refusal

PATIENCE = 240  # seconds; a longer wait is a hang


ENGINE = "tests.support.faulty.engine"


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # another process's state: there is no event to wait for
            await asyncio.sleep(0.005)


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Return a function that returns the path of the file with a suffix, such as ".gate".

    The files tell the engine of tests/support/faulty/engine.py when to wait and when to fail.
    """
    monkeypatch.setenv("FLASHPOINT_TEST_GATE", str(tmp_path / "open"))
    return (tmp_path / "open").with_suffix


class Bench:
    """The client of engine processes, and the memory pool that this process shares with them."""

    def __init__(self):
        self.engines = Engines([Metrics()])
        self.pool = Pool(1 << 30, self.engines.forget_segment)

    def job(self, name, priority=0, deadline=None):
        """Return a forward job with 4 queries and 4 keys. A job whose name begins with gate- waits for the gate."""
        info = TensorInfo("float32", (1, 1, 4, 8))
        spec = plan(dict.fromkeys("qkv", info), Options(), "forward")
        job = Job.stage(self.pool, Layout.of([(n, info) for n in "qkv"], spec.outputs))
        data = np.random.default_rng(0).standard_normal(info.shape, np.float32)
        for view in job.views(job.inputs).values():
            view[:] = data.reshape(-1).view(np.uint8).data
        body = encode(PlannedCall("forward", Options(), "reference", job.inputs, job.outputs))
        job.priority = priority
        job.ask(name, body, FREE, deadline)
        return job

    async def answer(self, job):
        """Submit a job, return its output o, and release its memory."""
        await self.engines.submit(job)
        o = np.frombuffer(job.views(job.outputs)["o"], np.float32).copy()
        job.release()
        return o

    async def begun(self, job):
        """Submit a job, wait until the engine has started it, and return the future of its answer."""
        answer = self.engines.submit(job)
        await until(lambda: job.slot.mark)
        return answer


@asynccontextmanager
async def bench():
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    made = Bench()
    async with running_engines(Settings(device="cpu", log_level="error"), ENGINE) as addresses:
        made.engines.connect(addresses)
        assert made.engines.state is State.STARTING
        await until(lambda: made.engines.state is not State.STARTING)
        try:
            yield made
        finally:
            made.engines.close()
            made.pool.close()


def engine_pids():
    """Return the ids of the engine processes that this process has started."""
    return [c.pid for c in psutil.Process().children() if ENGINE in c.cmdline()]


def test_order_cancelling_memory_and_closing(gate, monkeypatch):
    """Jobs run by priority, and in order within a priority. Cancelled and late jobs never start. Memory is released.

    After `close`, running and new jobs are refused, and no engine process is left.
    """
    now = time.monotonic()  # all jobs arrive at the same time and differ only in priority
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))

    async def run():
        async with bench() as b:
            first = await b.begun(first_job := b.job("gate-first"))
            jobs = [b.job("a"), b.job("b", priority=5), b.job("c", priority=9), b.job("d", priority=5), b.job("e")]
            tasks = [asyncio.create_task(b.answer(job)) for job in jobs]
            dropped, late = b.job("dropped"), b.job("late", deadline=0.0)
            cancelled = b.engines.submit(dropped)
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            dropped.release()
            assert b.pool.taken == 8  # with the memory of `dropped`, which the engine has not answered yet
            refused = b.engines.submit(late)
            gate(".gate").touch()
            with pytest.raises(Refusal) as caught:
                await refused
            assert caught.value.status == 504
            late.release()
            await first
            first_job.release()
            answers = await asyncio.gather(*tasks)
            in_order = sorted(jobs, key=lambda j: j.done.began)
            assert [j.message.request_id for j in in_order] == ["c", "b", "d", "a", "e"]
            assert not hasattr(dropped, "done")
            assert not hasattr(late, "done")
            assert all(np.array_equal(answers[0], other) for other in answers[1:])
            await until(lambda: b.pool.taken == 0)
            gate(".gate").unlink()
            running = await b.begun(b.job("gate-runs"))
            b.engines.close()
            with pytest.raises(Refusal) as caught:
                await running
            assert (caught.value.status, caught.value.code) == (503, "draining")
            with pytest.raises(Refusal, match="stopped"):
                b.engines.submit(b.job("after"))
            gate(".gate").touch()
        assert engine_pids() == []

    asyncio.run(run())


@pytest.mark.slow
def test_a_job_that_cannot_be_sent_fails_alone():
    async def run():
        async with bench() as b:
            bad = b.job("\ud800")  # a text that cannot be encoded
            with pytest.raises(UnicodeEncodeError):
                b.engines.submit(bad)
            bad.release()
            async with asyncio.timeout(PATIENCE):
                assert len(await b.answer(b.job("after"))) == 32
            assert b.pool.taken == 0

    asyncio.run(run())


@pytest.mark.slow
def test_a_killed_engine_fails_what_it_had_begun_and_another_does_the_rest(gate):
    async def run():
        async with bench() as b:
            expected = await b.answer(b.job("before"))
            (pid,) = engine_pids()
            left = b.job("left by its client")
            lost = await b.begun(begun := b.job("gate-runs"))
            leaving = b.engines.submit(left)
            waiting = [asyncio.create_task(b.answer(job)) for job in (b.job("waits"), b.job("waits too"))]
            await asyncio.sleep(0)  # lets the tasks of `waiting` send their jobs
            gate(".closed").touch()  # makes the next engine wait at its start
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Refusal) as caught:
                await lost
            assert (caught.value.status, caught.value.code) == (503, "engine_lost")
            begun.release()
            assert b.engines.state is State.STARTING
            leaving.cancel()
            left.release()
            with pytest.raises(Refusal, match="starting"):
                b.engines.submit(b.job("early"))
            gate(".closed").unlink()
            answers = await asyncio.gather(*waiting)  # the next engine computes these
            assert all(np.array_equal(answer, expected) for answer in answers)
            assert engine_pids() != [pid]
            assert np.array_equal(await b.answer(b.job("after")), expected)
            assert b.pool.taken == 1  # of the refused job "early", which its caller must release

    asyncio.run(run())


@pytest.mark.slow
def test_a_peer_that_reads_nothing_holds_up_the_others_for_a_while_only():
    """The engine disconnects a process that reads no answers, when they fill its socket, and serves another process."""

    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

    async def run():
        async with running_engines(Settings(device="cpu", log_level="error"), ENGINE) as (address,):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
                deaf.connect(address)
                q, k, v = (PlacedTensor(name, "float32", (1, 1), SLOT, 0) for name in "qkv")
                body = encode(PlannedCall("forward", Options(), "reference", (q, k, v), ()))
                # The engine answers a late job at once.
                late = Submit(
                    id=0, request_id="deaf", body=body, segment=7, start=0, mark=0, flops=0, seconds=0.0, rank=0.0,
                    deadline=0.0,
                )  # fmt: skip
                message = msgspec.msgpack.encode(late)
                deaf.settimeout(PATIENCE)

                def send_until_dropped():  # the unread answers fill the socket
                    for _ in range(100_000):
                        deaf.send(message)

                with pytest.raises(ConnectionError):
                    await asyncio.to_thread(send_until_dropped)
                made = Bench()
                made.engines.connect([address])
                await until(lambda: made.engines.state is State.READY)
                assert len(await made.answer(made.job("heard"))) == 32
                made.engines.close()
                made.pool.close()

    asyncio.run(run())


def test_the_service_fails_only_when_all_engines_have_failed(monkeypatch):
    engines, made = Engines(), []
    monkeypatch.setattr(Engine, "connect", lambda engine: made.append(engine))
    engines.connect([b"a", b"b"])
    first, second = made
    first.failure = "broken"
    first.become(State.FAILED)
    assert (engines.state, engines.failure) == (State.STARTING, None)
    second.become(State.READY)
    assert (engines.state, engines.failure) == (State.READY, None)
    second.failure = "broken too"
    second.become(State.FAILED)
    assert (engines.state, engines.failure) == (State.FAILED, "broken")
