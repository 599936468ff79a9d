"""The process that reads and writes JSON: no later than the deadline, and refused where the system has none to give."""

import asyncio
import contextlib
import os
import resource
import time

import numpy as np
import pytest

from flashpoint import jsonwire
from flashpoint_server.codec import Codec
from flashpoint_server.memory import Pool, PoolFullError
from flashpoint_server.refusal import Refusal

TEXT = jsonwire.encode({"q": np.ones((2, 2), np.float32)}, {})
LONG = jsonwire.encode({"q": np.ones((1 << 10, 1 << 10), np.float32)}, {})  # a million numbers


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


def refused(code):
    return pytest.raises(Refusal, check=lambda refusal: refusal.code == code)


def test_nobody_waits_for_json_beyond_the_deadline():
    async def run():
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

    asyncio.run(run())


def test_where_no_process_can_be_started_json_is_refused_until_one_can():
    async def run():
        codec = Codec()
        try:
            with no_descriptors(), refused("out_of_memory"):
                await codec.decode(TEXT, None)
            arrays, _ = await codec.decode(TEXT, None)
            assert arrays["q"].tolist() == [[1, 1], [1, 1]]
        finally:
            codec.close()

    asyncio.run(run())


def test_where_no_segment_can_be_made_the_pool_is_full_until_one_can():
    pool = Pool(64 << 20)
    try:
        with no_descriptors(), pytest.raises(PoolFullError, match="Too many open files"):
            pool.take(1)
        pool.take(1).release()
    finally:
        pool.close()
