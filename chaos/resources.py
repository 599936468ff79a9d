"""Faults that use up memory, descriptors, /dev/shm or staging memory, and then make them available again."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import http.client
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from chaos.clients import head_of
from chaos.questions import safetensors
from chaos.world import World

FEW = 3  # a fault leaves fewer descriptor numbers than this above the largest in use
LITTLE = 16 << 20  # bytes of address space that a fault leaves above the current use
LASTS = (0.1, 0.6)  # range of seconds that a fault lasts
GIANTS = (
    1 << 16,
    1 << 17,
    3 << 16,
)  # numbers of rows of 128 bytes, in the request and in the answer: 8, 16 or 24 MiB each way
JUMPS = (-400 * 86400, -3600, -5, 0, 5, 3600, 86400, 4000 * 86400)  # offsets of the clock in seconds
SAME = 60.0  # tolerance of the Date header in seconds, because an answer may take that long
TOLD = 60.0  # timeout in seconds for Date, which the service updates each second, to change
SLOTS = 12  # number of requests whose bodies remain incomplete, each with 8 MiB in the request and in the answer


def few_descriptors_http(world: World) -> str | None:
    """Leave an HTTP process almost no descriptors for new connections and for segments of staging memory."""
    with world.breaking():
        return _limited(world, "http", resource.RLIMIT_NOFILE)


def few_descriptors_engine(world: World) -> str | None:
    return _limited(world, "engine", resource.RLIMIT_NOFILE)


def little_memory_http(world: World) -> str | None:
    return _limited(world, "http", resource.RLIMIT_AS)


def little_memory_engine(world: World) -> str | None:
    return _limited(world, "engine", resource.RLIMIT_AS)


def little_memory_codec(world: World) -> str | None:
    return _limited(world, "codec", resource.RLIMIT_AS)


def _limited(world: World, role: str, which: int) -> str | None:
    pids = world.pids(role)
    if not pids:
        return None
    pid = world.choose(pids)
    try:
        with _limit(world, pid, which):
            status = _ask_giant(world)
            world.wait(*LASTS)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
    return f"a giant request got {status}"


@contextlib.contextmanager
def _limit(world: World, pid: int, which: int) -> Iterator[None]:
    process = psutil.Process(pid)
    if which == resource.RLIMIT_NOFILE:
        limit = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")) + 1  # RLIMIT_NOFILE limits the largest descriptor
        limit += int(world.rng.integers(FEW))
    else:
        limit = process.memory_info().vms + LITTLE
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, which, before)


def _ask_giant(world: World) -> int | str:
    """Send a request that needs new memory and a descriptor. The answer must be ones, 429 or 503.

    Return the status, or the name of the exception if the connection fails.
    """
    rows = GIANTS[int(world.rng.integers(len(GIANTS)))]
    q, k, v = np.zeros((1, 1, rows, 32), np.float32), *np.ones((2, 1, 1, 1, 32), np.float32)
    question = safetensors({"q": q, "k": k, "v": v}, {}, "/attention")
    connection = http.client.HTTPConnection("127.0.0.1", world.service.port, timeout=120)
    try:
        connection.request("POST", question.path, question.body, question.headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()
    if response.status == 200:
        if not (np.frombuffer(body[-q.nbytes :], np.float32) == 1).all():
            world.violations.append("a giant request got a wrong answer")
    elif response.status not in (429, 503):
        world.violations.append(f"a giant request got {response.status}: {body[:200]!r}")
    return response.status


def fill_staging(world: World) -> str | None:
    """Occupy all staging slots with incomplete bodies: other requests get 429. Then all slots must become free."""
    q, k, v = np.zeros((1, 4, 1 << 13, 64), np.float32), *np.zeros((2, 1, 4, 1, 64), np.float32)
    question = safetensors({"q": q, "k": k, "v": v}, {}, "/attention")
    head = head_of(question)
    with contextlib.ExitStack() as connections:
        for _ in range(SLOTS):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", world.service.port), timeout=10)
                connections.enter_context(connection)
                connection.settimeout(1)  # after a refusal, the service reads no more, and `sendall` blocks
                connection.sendall(head + question.body[: 1 << 16])
        world.wait(*LASTS)
    return f"{SLOTS} bodies begun"


def fill_shm(world: World) -> str | None:
    """Fill /dev/shm, and kill the codec processes, which convert JSON: the new ones must start without space there."""
    if not world.service.contained:
        return None
    path = Path(f"/proc/{world.service.pid}/root/dev/shm/filled")
    try:
        with path.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
            for pid in world.pids("codec"):
                os.kill(pid, signal.SIGKILL)
            world.wait(*LASTS)
            path.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES):  # the service does not run
            raise
        return None
    return "filled"


def slow_down(world: World) -> str | None:
    """Stop and continue the engine repeatedly, so that it runs a tenth of the time."""
    pids = world.pids("engine")
    if not pids:
        return None
    end = time.monotonic() + float(world.rng.uniform(*LASTS))
    while time.monotonic() < end:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.018)
            os.kill(pids[0], signal.SIGCONT)
            time.sleep(0.002)
    return "by ten"


def move_clock(world: World) -> str | None:
    """Move the wall clock forward or back, until the service's Date header shows it."""
    clock = world.service.clock
    if clock is None:
        return None
    to = JUMPS[int(world.rng.integers(len(JUMPS)))]
    clock.move(to)

    def seen() -> bool:
        date = world.service.date()
        return date is None or abs(email.utils.parsedate_to_datetime(date).timestamp() - time.time() - to) < SAME

    world.until(seen, TOLD, f"the clock was not moved by {to} s")
    return f"to {to:+} s"
