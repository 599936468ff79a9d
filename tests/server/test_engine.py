"""The engine process and the HTTP side's view of it: order, cancelling, death, and who holds which memory."""

import asyncio
import os
import signal
import socket
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import psutil
import pytest

from flashpoint_kernels.spec import Options, TensorInfo, plan
from flashpoint_server.benchmarks import Benchmarks
from flashpoint_server.engine import Engine, Engines, State
from flashpoint_server.job import AttentionJob, Timings
from flashpoint_server.memory import Pool
from flashpoint_server.messages import Submit, Tensor, pack_options
from flashpoint_server.metrics import Metrics
from flashpoint_server.processes import Child, running_engines
from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import Settings
from flashpoint_server.staging import Staging

PATIENCE = 60


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # another process's state: there is no event to wait for
            await asyncio.sleep(0.005)


class Bench:
    """Engines in processes of their own, and the pool that this process shares with them."""

    def __init__(self):
        self.engines = Engines(Metrics(), Benchmarks(Settings()))
        self.pool = Pool(1 << 30, self.engines.forget_segment)

    def job(self, name, length=4, heads=1, **how):
        """A forward job on `length` queries and keys; the longer, the slower."""
        info = TensorInfo("float32", (1, heads, length, 8))
        spec = plan(dict.fromkeys("qkv", info), Options(), "forward")
        staging = Staging.take(self.pool, [(n, info) for n in "qkv"], spec.outputs)
        data = np.random.default_rng(0).standard_normal(info.shape, np.float32)
        for view in staging.views(staging.inputs).values():
            view[:] = data.reshape(-1).view(np.uint8).data
        return AttentionJob(id=name, spec=spec, backend="reference", staging=staging, timings=Timings(0.0), **how)

    async def answer(self, job):
        """The output of a job; its memory is let go of."""
        await self.engines.submit(job)
        o = np.frombuffer(job.staging.views(job.staging.outputs)["o"], np.float32).copy()
        job.staging.release()
        return o

    async def busy(self):
        """A task whose job runs long enough for others to queue behind it."""
        task = asyncio.create_task(self.answer(self.job("first", 2000, heads=3)))
        await asyncio.sleep(0)
        return task


@asynccontextmanager
async def bench(device="cpu"):
    made = Bench()
    async with running_engines(Settings(device=device, log_level="error")) as addresses:
        made.engines.connect(addresses)
        assert made.engines.state is State.STARTING
        await until(lambda: made.engines.state is not State.STARTING)
        try:
            yield made
        finally:
            made.engines.close()
            made.pool.close()


def engine_pids():
    """The engine processes that this one has started."""
    return [c.pid for c in psutil.Process().children() if "flashpoint_server.engine_process" in c.cmdline()]


def test_order_cancelling_and_memory():
    """Priority first, equals in order; a cancelled or late job is not begun; nothing stays taken."""

    async def run():
        async with bench() as b:
            first = await b.busy()
            jobs = [b.job("a"), b.job("b", priority=5), b.job("c", priority=9), b.job("d", priority=5), b.job("e")]
            tasks = [asyncio.create_task(b.answer(job)) for job in jobs]
            dropped, late = b.job("dropped"), b.job("late", deadline=0.0)
            cancelled = b.engines.submit(dropped)
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            dropped.staging.release()
            assert b.pool.taken == 8  # the engine still holds the memory of what it has not answered
            with pytest.raises(Refusal) as caught:
                await b.engines.submit(late)
            assert caught.value.status == 504
            late.staging.release()
            answers = await asyncio.gather(first, *tasks)
            assert [j.id for j in sorted(jobs, key=lambda j: j.timings.compute)] == ["c", "b", "d", "a", "e"]
            assert not dropped.timings.compute
            assert not late.timings.compute
            assert all(np.array_equal(answers[1], other) for other in answers[2:])
            await until(lambda: b.pool.taken == 0)

    asyncio.run(run())


def test_a_killed_engine_fails_what_it_had_begun_and_another_does_the_rest():
    async def run():
        async with bench() as b:
            expected = await b.answer(b.job("before"))
            (pid,) = engine_pids()
            begun, left = b.job("runs", 3000, heads=3), b.job("left by its client")
            lost = b.engines.submit(begun)
            await until(lambda: begun.staging.slot.mark)
            leaving = b.engines.submit(left)
            waiting = [asyncio.create_task(b.answer(job)) for job in (b.job("waits"), b.job("waits too"))]
            await asyncio.sleep(0)  # they are sent
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Refusal) as caught:
                await lost
            assert (caught.value.status, caught.value.code) == (503, "engine_lost")
            begun.staging.release()
            assert b.engines.state is State.STARTING
            leaving.cancel()
            left.staging.release()
            with pytest.raises(Refusal, match="starting"):
                b.engines.submit(b.job("early"))
            answers = await asyncio.gather(*waiting)  # by another engine
            assert all(np.array_equal(answer, expected) for answer in answers)
            assert engine_pids() != [pid]
            assert np.array_equal(await b.answer(b.job("after")), expected)
            assert b.pool.taken == 1  # of the one that came too early: it is its caller's

    asyncio.run(run())


def test_a_peer_that_reads_nothing_holds_up_the_others_for_a_while_only():
    """A stopped HTTP process: its answers fill its socket, and it is dropped; another's job is answered."""

    async def run():
        async with running_engines(Settings(device="cpu", log_level="error")) as (address,):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
                deaf.connect(address)
                tensors = [Tensor(name, "float32", (1, 1), 7, 0) for name in "qkv"]
                options = pack_options(Options())
                # so: at once
                late = Submit(0, "deaf", "forward", options, "reference", 7, tensors, [], 0, 0, 0.0, 0.0)
                message = msgspec.msgpack.encode(late)
                deaf.settimeout(PATIENCE)

                def send_until_dropped():  # some hundreds of answers fit its socket
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


def test_closed_engines_refuse_what_runs_and_what_comes_and_leave_no_process():
    async def run():
        async with bench() as b:
            running = await b.busy()
            b.engines.close()
            with pytest.raises(Refusal) as caught:
                await running
            assert (caught.value.status, caught.value.code) == (503, "draining")
            with pytest.raises(Refusal, match="stopped"):
                await b.engines.submit(b.job("after"))
        assert engine_pids() == []

    asyncio.run(run())


def test_a_device_that_is_not_there_fails_with_a_reason():
    async def run():
        async with bench("cuda:3") as b:
            assert b.engines.state is State.FAILED
            assert "no CUDA device" in b.engines.failure

    asyncio.run(run())


def test_one_broken_engine_of_several_is_not_the_end():
    metrics, benchmarks = Metrics(), Benchmarks(Settings())
    engines = Engines(metrics, benchmarks)
    engines._engines = [Engine(name, engines._resume, engines._keep, metrics, benchmarks) for name in (b"a", b"b")]
    first, second = engines._engines
    first.state, first.failure = State.FAILED, "broken"
    assert (engines.state, engines.failure) == (State.STARTING, None)
    second.state = State.READY
    assert (engines.state, engines.failure) == (State.READY, None)
    second.state, second.failure = State.FAILED, "broken too"
    assert (engines.state, engines.failure) == (State.FAILED, "broken")


def test_a_child_that_dies_is_started_again_and_ends_when_it_is_told_to(tmp_path, monkeypatch):
    """Three starts, each noted in a file; the third one stays."""
    module = tmp_path / "dies_twice.py"
    module.write_text(
        "import pathlib, signal, sys\n"
        "notes = pathlib.Path(sys.argv[-1])\n"
        "notes.write_text(notes.read_text() + 'x')\n"
        "sys.exit(3) if len(notes.read_text()) < 3 else signal.pause()\n"
    )
    notes = tmp_path / "notes"
    notes.write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def run():
        child = Child("dies twice", "dies_twice", [str(notes)], [])
        async with child.kept(PATIENCE):
            await until(lambda: len(notes.read_text()) == 3)
            assert child.starts == 3
            pid = child.pid
        assert not psutil.pid_exists(pid)

    asyncio.run(run())
