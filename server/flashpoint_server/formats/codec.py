"""Parse and write JSON in a separate process: a large body takes seconds, which would block the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from flashpoint_server.formats.codec_process import NUMBER, pack, room, unpack
from flashpoint_server.refusal import Refusal, out_of_time

T = TypeVar("T")

HANG_SECONDS = 60.0  # timeout of a call, after which the process is replaced; the largest call takes a few seconds


class Codec:
    """A process that runs one function call at a time. It is started for the first call, and again after it has died.

    A caller waits for earlier calls and for its result until `deadline`, in `time.monotonic` seconds. A call that has
    started continues after its deadline: a new process would take longer than most calls. Raises Refusal 503 and 504.
    """

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._turn = asyncio.Lock()
        self._call: asyncio.Task[tuple[bool, Any]] | None = None

    async def run(self, deadline: float | None, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`, called in the process. The function must be importable by its name.

        Raises the function's exceptions, and Refusal 503 and 504.
        """
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise out_of_time()  # do not start the call: nothing can stop it later
        try:
            async with asyncio.timeout(left):
                await self._turn.acquire()
                call = self._call = asyncio.create_task(self._ask((function, arguments)))
                call.add_done_callback(self._pass_on)
                await asyncio.wait([call])  # a timeout of this wait does not cancel the call
            if call.cancelled():
                raise Refusal("draining", "the server stopped before it answered this request; retry")
            returned, value = call.result()
        except TimeoutError:
            raise out_of_time() from None
        except (EOFError, ConnectionError):
            raise Refusal("engine_lost", "the process that reads JSON died with this request; retry") from None
        except OSError as error:  # the system allows no more descriptors or processes
            raise Refusal("out_of_memory", f"the process that reads JSON cannot be started: {error}") from None
        if returned:
            result: T = value
            return result
        if isinstance(value, MemoryError):
            raise Refusal("out_of_memory", "the process that reads JSON ran out of memory for this request")
        raise value

    async def _ask(self, message: Any) -> tuple[bool, Any]:
        """Return (True, the function's value) or (False, its exception)."""
        try:
            if self._process is None:
                self._process = _Process()
            async with asyncio.timeout(HANG_SECONDS):
                return await self._process.ask(message)
        except BaseException as error:  # end the process: the next call must not receive the rest of this answer
            self._end()
            if isinstance(error, TimeoutError):
                raise EOFError from None
            raise

    def _pass_on(self, call: asyncio.Task[tuple[bool, Any]]) -> None:
        self._turn.release()
        if not call.cancelled():
            call.exception()  # mark the exception as retrieved: `run` may no longer wait for it

    @property
    def pid(self) -> int:
        """The process's id; 0 if it does not run."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """Stop the process at once. The next call starts another."""
        if self._call is not None:
            self._call.cancel()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """The process, and our end of its socket. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        with theirs:
            fd, parent = theirs.fileno(), os.getpid()
            command = [
                "-P",
                "-m",
                "flashpoint_server.formats.codec_process",
                "--socket",
                str(fd),
                "--parent",
                str(parent),
            ]
            try:
                self._process = subprocess.Popen([sys.executable, *command], pass_fds=[fd])
            except BaseException:
                self._sock.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Any) -> tuple[bool, Any]:
        """Like `Codec._ask`. After an exception (EOFError, OSError, MemoryError), the process must be ended."""
        loop = asyncio.get_running_loop()
        for piece in pack(message):
            await loop.sock_sendall(self._sock, piece)
        returned, value = unpack([await self._read(await self._number()) for _ in range(await self._number())])
        return returned, value

    async def _number(self) -> int:
        return int(NUMBER.unpack(await self._read(NUMBER.size))[0])

    async def _read(self, size: int) -> memoryview:
        loop, place, done = asyncio.get_running_loop(), room(size), 0
        while done < size:
            if not (count := await loop.sock_recv_into(self._sock, place[done:])):
                raise EOFError
            done += count
        return place

    def end(self) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()
