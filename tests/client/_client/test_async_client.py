"""The asyncio client runs calls concurrently, and its classes have the methods of their synchronous counterparts."""

import asyncio
import inspect
import threading

import numpy as np
import pytest
import uvloop

import flashpoint
from flashpoint import sharded
from tests.support.framed import BIG, TINY, Q
from tests.support.raw_server import PATIENCE
from tests.support.scripted_server import message


def test_many_calls_of_one_async_client_run_at_once(scripted):
    barrier = threading.Barrier(4, timeout=PATIENCE)

    def together(handler):
        barrier.wait()
        handler.answer(body=message({"o": Q}))

    async def run():
        scripted.script.extend([together] * 4)
        async with flashpoint.AsyncClient(scripted.url) as client:
            return await asyncio.gather(*(client.attention(Q, Q, Q) for _ in range(4)))

    assert all(np.array_equal(o, Q) for o in asyncio.run(run()))


def methods(kind):
    """Return {method name: [(parameter name, kind, default), …]} for a class's public methods, `aclose` as `close`."""
    results = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            parameters = inspect.signature(function).parameters.values()
            results[name.removeprefix("a") if name == "aclose" else name] = [
                (p.name, p.kind, p.default) for p in parameters
            ]
    return results


@pytest.mark.parametrize(
    ("kind", "twin"),
    [
        (flashpoint.Client, flashpoint.AsyncClient),
        (flashpoint.Cache, flashpoint.AsyncCache),
        (flashpoint.BenchmarkRun, flashpoint.AsyncBenchmarkRun),
        (sharded.ShardedCache, sharded.AsyncShardedCache),
    ],
)
def test_the_asyncio_twin_has_the_same_methods_and_parameters(kind, twin):
    assert methods(kind) == methods(twin)


def test_the_async_client_runs_in_uvloop(scripted):
    done = threading.Event()

    async def run():
        async with flashpoint.AsyncClient(scripted.url) as client:
            big = BIG[:, : 1 << 20] + 1
            actual = await asyncio.gather(*(client.attention(big + i, TINY, TINY) for i in range(4)))
            assert all(np.array_equal(o, big + i) for i, o in enumerate(actual))
            scripted.script.append(lambda h: done.wait(PATIENCE))
            with pytest.raises(flashpoint.DeadlineExceededError):
                await client.attention(Q, Q, Q, timeout=0.1)

    uvloop.run(run())
    done.set()
