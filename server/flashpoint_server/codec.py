"""JSON bodies, read and written in a process of their own: seconds of Python for a large one, not the event loop's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from numpy.typing import NDArray

from flashpoint import jsonwire
from flashpoint_server.parent import die_with_parent
from flashpoint_server.refusal import Refusal, out_of_time

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class Codec:
    """One process, started with the first JSON body, and again when it was lost.

    `deadline` is in `time.monotonic` seconds: behind it nobody waits, for a turn or for the end. Every call raises
    Refusal 503 and 504.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def decode(self, text: bytes, deadline: float | None) -> tuple[Arrays, dict[str, Any]]:
        """As `jsonwire.decode`. Raises WireError and FieldError."""
        return await self.run(deadline, jsonwire.decode, text)

    async def encode(
        self, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any], deadline: float | None
    ) -> bytes:
        """As `jsonwire.encode`."""
        return await self.run(deadline, jsonwire.encode, arrays, metadata)

    async def run(self, deadline: float | None, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a module there. Raises what it raises."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        pool = self._pool
        try:
            if pool is None:
                pool = self._pool = ProcessPoolExecutor(1, get_context("spawn"), die_with_parent, (os.getpid(),))
            async with asyncio.timeout(left):
                return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except TimeoutError:
            raise out_of_time() from None
        except BrokenProcessPool:
            self._forget(pool)
            raise Refusal("engine_lost", "the process that reads JSON died with this request") from None
        except OSError as error:  # no semaphore, descriptor or process to be had
            self._forget(pool)
            raise Refusal("out_of_memory", f"the process that reads JSON cannot be started: {error}") from None
        except MemoryError:
            raise Refusal("out_of_memory", "the process that reads JSON ran out of memory for this request") from None

    def _forget(self, pool: ProcessPoolExecutor | None) -> None:
        """The next call starts another."""
        if self._pool is pool:
            self._pool = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
