"""The engine thread itself: the order in which it takes jobs, and what it lets go of."""

import asyncio
import weakref

import numpy as np
import pytest

from flashpoint_kernels.spec import Options, TensorInfo, plan
from flashpoint_server.engine import State, ThreadEngine
from flashpoint_server.job import Job, RawTensor, Timings
from flashpoint_server.refusal import Refusal


def job(name, length=4, heads=1, **how):
    """A forward job on `length` queries and keys; the longer, the slower."""
    shape = (1, heads, length, 8)
    info = {n: TensorInfo("float32", shape) for n in "qkv"}
    data = np.random.default_rng(0).standard_normal(shape, np.float32)
    tensors = {n: RawTensor("float32", shape, data.reshape(-1).view(np.uint8).copy()) for n in "qkv"}
    return Job(name, plan(info, Options(), "forward"), "reference", tensors, Timings(0.0), **how)


@pytest.fixture(scope="module")
def engine():
    engine = ThreadEngine("cpu")
    assert engine.state is State.STARTING
    engine.start()
    until(lambda: engine.state is not State.STARTING)
    assert engine.state is State.READY
    yield engine
    engine.stop()
    assert engine.join(10)
    assert engine.state is State.STOPPED


def until(condition):
    async def poll():
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110  # another thread's state: there is no event to wait for
                await asyncio.sleep(0.01)

    asyncio.run(poll())


async def busy(engine):
    """A task whose job runs long enough for others to queue behind it."""
    first = job("first", 1500, heads=2)
    task = asyncio.create_task(engine.submit(first))
    while not first.timings.compute:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return task


def test_higher_priority_goes_first_and_equals_in_order(engine):
    async def run():
        first = await busy(engine)
        jobs = [job("a"), job("b", priority=5), job("c", priority=9), job("d", priority=5), job("e")]
        await asyncio.gather(first, *(engine.submit(j) for j in jobs))
        return [j.id for j in sorted(jobs, key=lambda j: j.timings.compute)]

    assert asyncio.run(run()) == ["c", "b", "d", "a", "e"]


def test_age_outweighs_priority(engine, monkeypatch):
    monkeypatch.setattr("flashpoint_server.engine.PRIORITY_SECONDS", 1e-6)  # nine steps are worth 9 µs of waiting

    async def run():
        first = await busy(engine)
        old, new = job("old"), job("new", priority=9)
        tasks = [asyncio.create_task(engine.submit(old))]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(engine.submit(new)))
        await asyncio.gather(first, *tasks)
        return old.timings.compute < new.timings.compute

    assert asyncio.run(run())


def test_a_cancelled_job_is_not_begun_and_its_memory_is_let_go_of(engine):
    async def run():
        first = await busy(engine)
        dropped = job("dropped")
        memory = weakref.ref(dropped.tensors["q"].data)
        task = asyncio.create_task(engine.submit(dropped))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert dropped.cancelled
        assert not dropped.timings.compute
        del dropped, task
        await asyncio.sleep(0)  # the loop still holds the task that it woke us for
        assert memory() is None  # at once, not when the collector next runs
        assert not first.done()
        await first

    asyncio.run(run())


def test_a_job_that_is_late_is_not_begun(engine):
    async def run():
        first = await busy(engine)
        late = job("late", deadline=0.0)
        with pytest.raises(Refusal) as caught:
            await engine.submit(late)
        assert caught.value.status == 504
        assert not late.timings.compute
        await first

    asyncio.run(run())


def test_nothing_of_an_answered_job_is_kept(engine):
    async def run():
        done = job("done")
        memory = weakref.ref(done.tensors["q"].data)
        answer = await engine.submit(done)
        assert answer.tensors["o"].shape == (1, 1, 4, 8)
        return memory

    memory = asyncio.run(run())
    until(lambda: memory() is None)


def test_a_stopped_engine_refuses_what_waits_and_what_comes():
    async def run():
        engine = ThreadEngine("cpu")
        with pytest.raises(Refusal, match="starting"):
            await engine.submit(job("early"))
        engine.start()
        while engine.state is State.STARTING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running = await busy(engine)
        waiting = asyncio.create_task(engine.submit(job("waits")))
        await asyncio.sleep(0)
        engine.stop()
        for task in (running, waiting):
            with pytest.raises(Refusal) as caught:
                await task
            assert (caught.value.status, caught.value.code) == (503, "draining")
        with pytest.raises(Refusal, match="stopped"):
            await engine.submit(job("after"))
        assert engine.join(30)

    asyncio.run(run())


def test_a_device_that_is_not_there_fails_with_a_reason():
    engine = ThreadEngine("cuda:3")
    engine.start()
    until(lambda: engine.state is not State.STARTING)
    assert engine.state is State.FAILED
    assert "no CUDA device" in engine.failure
    assert engine.join(10)
