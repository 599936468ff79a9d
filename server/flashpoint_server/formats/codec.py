"""Run long work in processes that can be ended: a large body in JSON takes seconds, and a plot half a second.

The event loop itself parses no text longer than ON_LOOP (`Codecs.parse`). Work on a list of bounded length, which needs
the secrets of this process, is done in parts (`in_turns`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flashpoint_server.formats.codec_process import HEAD, beside, pack, room, size_of, sizes_of, unpack
from flashpoint_server.refusal import Refusal, out_of_time

if TYPE_CHECKING:
    from flashpoint_server.http.body import RequestBody

T = TypeVar("T")
Item = TypeVar("Item")
Text = bytes | memoryview

# Maximum bytes of a text that the event loop parses, with all errors in it: this takes a few milliseconds at most.
ON_LOOP = 1 << 12
HEAD_ON_LOOP = 1 << 14  # the same for a head of safetensors, which has few errors, and ids of many caches
AT_ONCE = 16  # maximum number of items of a list that the event loop processes at once
SMALL = 1 << 18  # a call with at most this many bytes of arguments does not wait for larger ones: it takes milliseconds
ABANDONED_SECONDS = 1.0  # how long a call continues that nobody waits for; a new process takes about as long to start
HANG_SECONDS = 60.0  # timeout of a call, after which the process is replaced; the largest call takes a few seconds


class Codecs:
    """The processes of an HTTP process: one for small texts, one for large ones, and one for plots."""

    def __init__(self) -> None:
        self.small, self.large, self.plots = (Codec(name) for name in ("json", "large-json", "plots"))

    async def run(self, body: RequestBody, function: Callable[..., T], *arguments: Any) -> T:
        """Like `Codec.run`, in the process for the size of `arguments`, until the deadline of the request with `body`.

        The call ends when the client disconnects. Also raises ClientGoneError.
        """
        codec = self.small if sum(map(_weight, arguments)) <= SMALL else self.large
        return await body.while_connected(codec.run(body.deadline, function, *arguments))

    async def parse(
        self,
        body: RequestBody,
        function: Callable[..., T],
        text: bytes | memoryview,
        *arguments: Any,
        here: int = ON_LOOP,
    ) -> T:
        """Return `function(text, *arguments)`, called here if `text` has at most `here` bytes, else in a process.

        Its result must be bounded, because the event loop unpickles it. Raises like the function, and like `run`.
        """
        if len(text) <= here:
            return function(bytes(text), *arguments)
        return await self.run(body, function, text, *arguments)

    def pids(self) -> dict[str, int]:
        """Return the ids of the processes by name; 0 for one that does not run."""
        return {codec.name: codec.pid for codec in (self.small, self.large, self.plots)}

    def close(self) -> None:
        """Stop the processes at once. The next calls start others."""
        for codec in (self.small, self.large, self.plots):
            codec.close()


async def in_turns(items: Sequence[Item]) -> AsyncIterator[Sequence[Item]]:
    """Yield `items` in parts of at most AT_ONCE. Between two parts, the event loop does other work."""
    for start in range(0, len(items), AT_ONCE):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + AT_ONCE]


def _weight(argument: Any) -> int:
    """Return the size of an argument that is a text, or a mapping of arrays, in bytes."""
    if isinstance(argument, bytes | memoryview | str):
        return len(argument)
    return sum([getattr(one, "nbytes", 0) for one in argument.values()]) if isinstance(argument, dict) else 0


class Codec:
    """A process that runs one function call at a time. It is started for the first call, and again after it has died.

    A caller waits for earlier calls and for its result until `deadline`, in `time.monotonic` seconds. A caller that is
    cancelled before its call starts has no call. A call that has started continues for ABANDONED_SECONDS without a
    caller: a new process would take longer than most calls.
    """

    def __init__(self, name: str = "json") -> None:
        self.name = name
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
                try:
                    await asyncio.wait([call])  # a timeout of this wait does not cancel the call
                except asyncio.CancelledError:
                    asyncio.get_running_loop().call_later(ABANDONED_SECONDS, call.cancel)
                    raise
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
                self._process = _Process(self.name)
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

    def __init__(self, name: str) -> None:
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
                "--name",
                name,
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
        function, arguments = message
        for piece in pack((function, [beside(one) for one in arguments])):
            await loop.sock_sendall(self._sock, piece)
        head = await self._read(HEAD)
        middle = await self._read(size_of(head))
        returned, value = unpack(middle, [await self._read(size) for size in sizes_of(head, middle)])
        return returned, value

    async def _read(self, size: int) -> memoryview:
        loop, place, done = asyncio.get_running_loop(), room(size), 0
        while done < size:
            if not (count := await loop.sock_recv_into(self._sock, place[done:])):
                raise EOFError
            done += count
        return place

    def end(self) -> None:
        """Kill the process. Its memory is freed meanwhile, which may take long."""
        self._sock.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()
