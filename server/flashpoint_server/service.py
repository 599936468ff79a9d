"""The state that routes share: settings, keys, engines, admission, and whether the server accepts new work."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from flashpoint_server.access.admission import Admission
from flashpoint_server.access.cache_ids import CacheIds
from flashpoint_server.access.keys import Caller, Keyring
from flashpoint_server.access.saved_ids import SavedIds
from flashpoint_server.config.files import Files
from flashpoint_server.config.key_file import Permission
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.http.origin_policy import OriginPolicy
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.client import Engines, Listener
from flashpoint_server.ipc.counts import Counts, WorkerGroup
from flashpoint_server.ipc.messages import DeviceInfo, SavedOwners
from flashpoint_server.ipc.regions import Regions
from flashpoint_server.ipc.staging import Pool
from flashpoint_server.observability.lines import LINES
from flashpoint_server.observability.metrics import Metrics
from flashpoint_server.plan import Plans
from flashpoint_server.refusal import Refusal

if TYPE_CHECKING:
    from flashpoint_server.observability.traces import Traces

log = structlog.stdlib.get_logger("flashpoint.service")

LAG_SECONDS = 0.1  # seconds between two measurements of the event loop's lag
REPORT_SECONDS = 1.0  # seconds between two calls of `report`; each scrape of the metrics also calls it


class Service(Listener):
    """The state that the routes of one HTTP process share. `shared` has the memory that all HTTP processes share."""

    def __init__(self, settings: Settings, shared: WorkerGroup, files: Files | None = None) -> None:
        self.settings = settings
        self._shared = shared
        self.metrics = Metrics(shared)
        self.engine = engines = Engines([self.metrics, self])
        self.traces: Traces | None = None
        self.ended: list[Callable[[Request, str, float], None]] = [self.metrics.ended]  # told of each request that ends
        if settings.otlp_endpoint:
            from flashpoint_server.observability.traces import Traces  # needs the packages of the extra `otel`

            try:
                self.traces = Traces(settings.otlp_endpoint)
                engines.listeners.append(self.traces)
                self.ended.append(self.traces.request)
            except ValueError as error:
                log.error("no traces", error=str(error), advice="correct OpenTelemetry's variables (OTEL_…)")
        self.counts = Counts(shared)
        self.pool = Pool(settings.staging_bytes, engines.forget_segment, self.counts)
        self.regions = Regions(settings.shared_memory_bytes, engines.forget_segment)
        self.codec = Codecs()
        self.plans = Plans(settings)
        self.files = files or Files(settings)
        self.keys = Keyring(settings, shared, self.files)
        self.cache_ids = CacheIds(settings, shared)
        self.saved_ids = SavedIds(self.cache_ids)
        # For each cache that this process has used, by its engine's incarnation and its serial number: its length, and
        # the number of keys that the last call read from it.
        self.cache_lengths: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self.sites = OriginPolicy(settings.allowed_hosts, settings.cors_origins)
        self.admission = Admission(settings, self.counts)
        self.draining = False
        self.withdrawn = False  # whether an engine has found wrong answers of its own (--verify-action drain)
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def authorize(self, request: Request, right: Permission) -> Caller:
        """Find the caller, whose key must have `right`. Raises Refusal 401, 403, and 429 at the key's limits."""
        caller = request.caller = self.keys.find(request.headers)
        request.key = caller.name
        caller.use(right)
        return caller

    def reload_keys(self) -> None:
        """Read the key file again, and free the caches and saved forwards of removed keys."""
        self.keys.reload()
        self.engine.tell_all(SavedOwners(self.keys.names))

    def check_ready(self) -> DeviceInfo:
        """Return the device if the server accepts new work. Raises Refusal 503."""
        if self.draining:
            raise Refusal("draining", "the server is shutting down")
        if self.withdrawn:
            raise Refusal("draining", "the server has found wrong answers of its own, and waits for its operator")
        if (device := self.engine.device) is None:
            raise Refusal("not_ready", f"the engine is {self.engine.state.value}")
        return device

    def check_working(self) -> None:
        """Like `check_ready`, but also refuse while a signal has stopped the engines' processes. Raises Refusal 503."""
        self.check_ready()
        if self.engine.stopped:
            raise Refusal("not_ready", "the engine's process is stopped; a request would wait until it continues")

    def withdraw(self, wrong: int) -> None:
        """Accept no new work from now on. Admitted requests are answered."""
        if not self.withdrawn:
            log.error("withdrawn", wrong=wrong, reason="--verify-action drain")
        self.withdrawn = True

    def begin(self) -> DeviceInfo:
        """Count a compute request. Return the device. Call `end` after the answer's last byte. Raises Refusal 503."""
        device = self.check_ready()
        self._working += 1
        self._idle.clear()
        return device

    def end(self) -> None:
        self._working -= 1
        if not self._working:
            self._idle.set()

    @property
    def ready(self) -> bool:
        """Whether the server accepts new work: `check_working` raises no Refusal."""
        try:
            self.check_working()
        except Refusal:
            return False
        return True

    async def keep_reporting(self) -> None:
        """Until cancelled, set the metrics of the present state every second, and free unused staging memory."""
        while True:
            self.report()
            self.pool.make_room()
            await asyncio.sleep(REPORT_SECONDS)

    async def keep_timing(self) -> None:
        """Until cancelled, measure how late the event loop runs: a long step, or a busy machine, delays a timer."""
        while True:
            due = time.monotonic() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.metrics.lag(max(0.0, time.monotonic() - due))

    def report(self) -> None:
        """Set the metrics of this process's present state: admitted requests, readiness and process ids."""
        self.metrics.ready(self.ready)
        number = self._shared.process
        self.metrics.process(f"http-{number}", os.getpid())
        self.metrics.dropped(f"http-{number}", LINES.dropped())
        for name, pid in self.codec.pids().items():
            self.metrics.process(f"{name}-{number}", pid)
        for name, pid in self.engine.processes():
            self.metrics.process(name, pid)
            self.metrics.dropped(name, 0)
            self.metrics.cache_limit(name, self.settings.cache_bytes)
        for name, off in self.engine.kernels_off():
            self.metrics.kernels_off(name, off)
        if self._shared.memory is not None:
            self.metrics.process("supervisor", os.getppid())
        inside = self.admission
        self.metrics.queue(
            requests=inside.requests,
            bytes=inside.bytes,
            flops=inside.flops,
            seconds=inside.seconds,
            oldest_seconds=inside.oldest_seconds,
            staging_slots=self.pool.taken,
        )

    async def drain(self) -> bool:
        """Refuse new work, and wait at most `shutdown_timeout`. Return whether all admitted requests were answered."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.settings.shutdown_timeout)
        return self._idle.is_set()

    def close(self) -> None:
        """Refuse the requests that remain, and free the memory."""
        self.engine.close()
        self.codec.close()
        self.pool.close()
        if self.traces is not None:
            self.traces.close()
        self.regions.close()
