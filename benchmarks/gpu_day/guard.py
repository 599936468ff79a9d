"""Run tasks in processes that are separate from the process that writes the record.

A task may crash its process, hang, or leave the GPU in a state where nothing works in that process any more. Each of
these failures ends only the guarded process, and the next task gets a new process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.gpu_day.device import Cuda
from benchmarks.gpu_day.plan import Task

_SPAWN = get_context("spawn")
_END_SECONDS = 10.0  # after this timeout, do not wait longer for a process that hangs in the GPU's driver
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG (man 2 prctl)


class Answer(NamedTuple):
    """The outcome of a task: a result, or the reason of a failure. `fresh`: it was the first task of its process."""

    result: Any = None
    failed: str | None = None
    timed_out: bool = False
    lost: bool = False  # the process ended, or its device does not work any more
    fresh: bool = True


class Guard:
    """One process that performs tasks one after the other. If a task ends it, the next task starts a new process."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self._process: Any = None
        self._pipe: Connection
        self._used = False

    def ask(self, action: str, task: Task | None, seconds: float) -> Answer:
        """Call `work.ACTIONS[action]` with the device and `task` in the guarded process, and wait at most `seconds`."""
        fresh = self._process is None
        if fresh:
            self._start()
        try:
            self._pipe.send((action, task))
            if not self._pipe.poll(seconds):
                self.close()
                return Answer(failed=f"no answer within {seconds:.0f} s", timed_out=True, lost=True, fresh=fresh)
            result, failed, lost = self._pipe.recv()
        except (EOFError, OSError):
            return Answer(failed=self._died(), lost=True, fresh=fresh)
        if lost:
            self.close()
        return Answer(result, failed, lost=lost, fresh=fresh)

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_END_SECONDS)
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, self._device, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def _died(self) -> str:
        self._process.join()
        code = self._process.exitcode
        self.close()
        return f"the process ended: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


class Pool:
    """Guards that run in parallel. They compile and run smoke tests, but never time anything.

    Each thread has its own guard, because a process is killed when the thread that started it ends (`die_with_parent`).
    """

    def __init__(self, device: Cuda, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes, initializer=self._begin, initargs=(device,))
        self._of_thread = threading.local()
        self._guards: list[Guard] = []

    def _begin(self, device: Cuda) -> None:
        self._of_thread.guard = Guard(device)
        self._guards.append(self._of_thread.guard)

    def ask_all(
        self, action: str, tasks: Sequence[Task], seconds: Callable[[Task], float], apart: bool
    ) -> Iterator[tuple[Task, Answer]]:
        """Yield each task with its answer, in the order of the answers; with `apart`, each task has its own process.

        `seconds` returns the time limit of a task just before it starts; a task with a limit of 0 or less is left out.
        """

        def ask(task: Task) -> Answer | None:
            guard: Guard = self._of_thread.guard
            if (limit := seconds(task)) <= 0:
                return None
            if apart:
                guard.close()
            answer = guard.ask(action, task, limit)
            if apart:
                guard.close()
            return answer

        futures = {self._threads.submit(ask, task): task for task in tasks}
        for future in as_completed(futures):
            if (answer := future.result()) is not None:
                yield futures[future], answer

    def close(self) -> None:
        for guard in self._guards:
            guard.close()
        self._threads.shutdown()


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends, so that no process remains."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _serve(pipe: Connection, device: Cuda, parent: int) -> None:
    """Answer requests from a pipe: receive (action, task), send (result, failure or None, device is lost)."""
    die_with_parent()
    if os.getppid() != parent:
        return
    from benchmarks.gpu_day import work  # this imports torch, which takes seconds

    while True:
        try:
            action, task = pipe.recv()
        except EOFError:
            return
        try:
            answer = work.ACTIONS[action](device, task), None, False
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"[:500], device.is_lost()
        pipe.send(answer)
