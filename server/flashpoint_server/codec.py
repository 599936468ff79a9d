"""JSON bodies, read and written in a process of their own: seconds of Python for a large one, not the event loop's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from numpy.typing import NDArray

from flashpoint import jsonwire
from flashpoint_server.parent import die_with_parent
from flashpoint_server.refusal import Refusal

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")


class Codec:
    """One process, started with the first JSON body, and again when it was lost."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def decode(self, text: bytes) -> tuple[Arrays, dict[str, Any]]:
        """As `jsonwire.decode`. Raises WireError and FieldError."""
        return await self.run(jsonwire.decode, text)

    async def encode(self, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> bytes:
        """As `jsonwire.encode`."""
        return await self.run(jsonwire.encode, arrays, metadata)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a module there. Raises what it raises."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), die_with_parent, (os.getpid(),))
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            raise Refusal("engine_lost", "the process that reads JSON died with this request") from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
