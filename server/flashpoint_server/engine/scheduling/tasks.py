"""The tasks of an engine: the scheduler chooses them, and the executor runs them.

`requests` are the requests of a task. `long`: it takes longer than other requests should wait. `brief`: it is so short
that no other lane needs to listen for messages while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from flashpoint_kernels import Problem
from flashpoint_server.engine.scheduling.engine_request import EngineRequest
from flashpoint_server.ipc.messages import FromEngine, StartBenchmark, StopJob


class Plugin(Protocol):
    """Work in addition to requests, such as benchmarks. It runs in slices, while nothing else runs on the device.

    A slice is `begin`, `step` and `conclude`. All calls except `step` are made under the scheduler's lock. The messages
    from `hear` and `conclude` go to every HTTP process, those from `history` to an HTTP process that connects. `wants`
    learns whether requests wait and whether tasks run. If it returns True while tasks run, no others start until they
    have ended, so that the slice begins soon.
    """

    name: str  # the plugin's name in the log
    suspect: bool  # whether the last slice may have broken the device

    @property
    def active(self) -> bool: ...  # whether `wants` may return True
    @property
    def due(self) -> float: ...  # if `active`: when to call `wants` again if nothing happens, by `time.monotonic`

    def hear(self, message: StartBenchmark | StopJob) -> Sequence[FromEngine]: ...
    def history(self) -> Iterable[FromEngine]: ...
    def wants(self, now: float, *, waiting: bool, running: bool) -> bool: ...
    def postpone(self, now: float) -> None: ...
    def begin(self) -> None: ...
    def step(self) -> None: ...
    def conclude(self) -> Sequence[FromEngine]: ...


class Compute(NamedTuple):
    """Compute one part of a request, or of requests that were cut together, of which the first has the parts."""

    requests: Sequence[EngineRequest]
    problem: Problem
    long: bool
    brief: bool


class Split(NamedTuple):
    """Cut one request with many sequences, or one or more requests over caches, into parts to compute.

    Requests over caches are cut together if their caches begin with the same keys; if there is only one part, this task
    also computes it. Otherwise the first part runs directly afterwards. `cores` is the number of free cores.
    """

    requests: Sequence[EngineRequest]
    long: bool
    brief: bool
    cores: int


class SaveForward(NamedTuple):
    """Save the tensors of a request whose parts have all ended, and answer it."""

    requests: tuple[EngineRequest]
    long: bool = False
    brief: bool = False


class Ask(NamedTuple):
    """Execute a call about caches or saved forwards, and answer it."""

    requests: tuple[EngineRequest]
    long: bool = False
    brief: bool = False


class Launch(NamedTuple):
    """Compute requests in one launch, or run a verification."""

    requests: Sequence[EngineRequest]
    long: bool = True
    brief: bool = False


class BenchmarkSlice(NamedTuple):
    """Run one slice of `plugin`, alone on the device."""

    plugin: Plugin
    requests: Sequence[EngineRequest] = ()
    long: bool = True
    brief: bool = False


Task = Compute | Split | SaveForward | Ask | Launch | BenchmarkSlice
