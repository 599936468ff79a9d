"""The metrics of the service, for Prometheus.

A single HTTP process counts in its own memory. Several HTTP processes count in memory that they share (shared.py), and
any of them answers a scrape for all. The versions and the resources of each process are read at each scrape
(observed.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from flashpoint_kernels.native import switches
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.client import Engine, Listener
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.messages import AnswerVerified, DeviceInfo, Done, Holding
from flashpoint_server.observability.memory import memory_metrics
from flashpoint_server.observability.observed import build_info, used
from flashpoint_server.observability.shared import SharedCollector, count_in
from flashpoint_server.processes.counting import MULTIPROCESS

MEDIA_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STAGES = ("decode", "queue", "copy_in", "compute", "copy_out", "encode")
ENDS = ("answered", "refused", "cancelled")
AT_ONCE = 256  # number of metric updates to do in one batch; about 50 requests make that many
_PROCESS_ID = "flashpoint_process_id"


class _Registry(CollectorRegistry):
    """A registry that calls `before` when the metrics are read."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def collect(self) -> Iterable[Metric]:
        self._before()
        return super().collect()


class Metrics(Listener):
    """The metrics of one ASGI application. Times are in seconds. Other collectors may register with `registry`."""

    def __init__(self, shared: WorkerGroup = WorkerGroup()) -> None:  # noqa: B008  # a tuple
        self._counted = shared.memory
        if shared.memory is not None:
            count_in(shared.memory, shared.process)
        self.registry = registry = _Registry(self._count)
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        several = self._counted is not None or MULTIPROCESS in os.environ
        self._at_once = 1 if several else AT_ONCE  # 1: other processes may read the counts at any time

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"flashpoint_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"flashpoint_{name}", help_, labels, buckets=buckets, registry=registry)

        def gauge(name: str, help_: str, mode: str, *labels: str) -> Gauge:
            return Gauge(f"flashpoint_{name}", help_, labels, registry=registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        self._requests = counter(
            "requests", "Requests by route, HTTP status and problem code", "route", "status", "reason"
        )
        self._by_key = counter("key_requests", "Requests by API key and problem code", "key", "reason")
        self._seconds = histogram(
            "request_seconds", "Seconds from a request's head to the end of its answer", _SECONDS, "route"
        )
        # Counts an admitted compute request. Call `left` once, when it ends.
        self.accepted = partial(self._later, counter("accepted", "Compute requests admitted").inc)
        ended = counter("ended", "Admitted compute requests that have ended", "how")
        self._ended = {how: ended.labels(how) for how in ENDS}
        about = "Connections closed at the server's stop without an answer to their request"
        self._unanswered = counter("unanswered_connections", about)
        self._bytes_in = counter("received_bytes", "Bytes of request bodies received")
        self._bytes_out = counter("sent_bytes", "Bytes of response bodies sent")
        stage = histogram("stage_seconds", "Seconds of each stage of an answered request", _SECONDS, "stage")
        self._stages = {name: stage.labels(name) for name in STAGES}
        # Records the seconds of each stage of an answered request. A stage of 0 seconds is not recorded.
        self.took: Callable[[Mapping[str, float]], None] = partial(self._later, self._record)

        self._batch_size = histogram("batch_size", "Requests in one launch", (1, 2, 4, 8, 16, 32, 64, 128))
        tenths = tuple(tenth / 10 for tenth in range(1, 11))
        self._batch_fill = histogram("batch_fill", "Fraction of the batch budget that a launch used", tenths)
        self._padding = counter("padding_saved_flops", "FLOPs saved by not padding to the longest sequence")
        self._flops = counter("compute_flops", "FLOPs computed", "backend")
        self._compute = counter("compute_seconds", "Seconds of kernel launches, without copies", "backend")
        self._speed = gauge("kernel_tflops", "TFLOP/s of the last launch", "mostrecent")
        self._memory = gauge("device_memory_bytes", "Bytes of device memory that the engine holds", "mostrecent")
        once = "Bytes of KV caches; memory shared by forks counts once"
        self._holding = {
            "caches": gauge("caches", "KV caches that engines hold", "livemax", "engine"),
            "nbytes": gauge("cache_bytes", once, "livemax", "engine"),
            "saved": gauge("saved_forwards", "Saved forwards that engines hold", "livemax", "engine"),
            "saved_nbytes": gauge("saved_bytes", "Bytes of saved forwards", "livemax", "engine"),
        }
        limit = "Limit in bytes for KV caches and saved forwards in an engine"
        self._cache_limit = gauge("cache_limit_bytes", limit, "livemax", "engine")
        self._verified = counter(
            "verified", "Answers that engines chose for --verify-rate", "backend", "dtype", "direction", "result"
        )
        self._off = gauge(
            "kernels_off", "1 for a kernel or backend that is switched off; by: setting or check", "livemax", "engine",
            "kernel", "by",
        )  # fmt: skip
        self._restarts = counter("engine_restarts", "Engine restarts")
        self._splits = counter("out_of_memory_splits", "Batches split in two because memory ran out")

        oldest = "Age of the oldest request without an answer, from the end of its body"
        self._queue = {
            "requests": gauge("queue_requests", "Admitted requests: arriving, waiting, running or leaving", "livesum"),
            "bytes": gauge("queue_bytes", "Bytes of tensors of admitted requests", "livesum"),
            "flops": gauge("queue_flops", "FLOPs of admitted requests", "livesum"),
            "seconds": gauge("queue_predicted_seconds", "Predicted compute seconds of admitted requests", "livesum"),
            "oldest_seconds": gauge("queue_oldest_seconds", oldest, "livemax"),
            "staging_slots": gauge("staging_slots", "Staging memory slots in use", "livesum"),
        }
        self._ready = gauge("ready", "1 if the server accepts new work (GET /health/ready), else 0", "livemin")
        self._certificate = gauge(
            "certificate_expiry_timestamp_seconds",
            "Unix time at which the first certificate of --tls-cert expires; 0 without TLS", "livemin",
        )  # fmt: skip
        self._processes = gauge("process_id", "Process ids of the service's processes", "livemostrecent", "process")
        self._lag = histogram("loop_lag_seconds", "Seconds that a timer of the event loop was late", _LAGS)
        self._dropped = counter(
            "log_lines_dropped", "Log lines dropped because the log was not read in time", "process"
        )

    def _later(self, count: Callable[..., None], *arguments: Any) -> None:
        """Call `count(*arguments)` later, in a batch of updates, but before the metrics are read.

        A batch costs less than the same updates one by one, because their code stays in the CPU's caches.
        """
        self._waiting.append((count, arguments))
        if len(self._waiting) >= self._at_once:
            self._count()

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        for count, arguments in waiting:
            count(*arguments)

    def ended(self, request: Request, route: str, seconds: float) -> None:
        """Count a request that has ended, with or without an answer."""
        reason = request.code or "ok"
        sizes = request.bytes_in, request.bytes_out
        self._later(self._count_ended, route, str(request.status), reason, request.key, seconds, *sizes)

    def _count_ended(
        self, route: str, status: str, reason: str, key: str, seconds: float, bytes_in: int, bytes_out: int
    ) -> None:
        self._requests.labels(route, status, reason).inc()
        if key:
            self._by_key.labels(key, reason).inc()
        self._seconds.labels(route).observe(seconds)
        self._bytes_in.inc(bytes_in)
        self._bytes_out.inc(bytes_out)

    def left(self, how: str) -> None:
        """Count the end of an admitted request. `how` is answered, refused or cancelled."""
        self._later(self._ended[how].inc)

    def _record(self, stages: Mapping[str, float]) -> None:
        for name, seconds in stages.items():
            if seconds:
                self._stages[name].observe(seconds)

    def computed(self, engine: Engine, done: Done) -> None:
        if done.dropped:
            self.dropped(engine.process[0], done.dropped)
        self._later(self._count_launch, done)

    def _count_launch(self, done: Done) -> None:
        backend = done.metadata["backend"]
        self._memory.set(done.memory)
        if done.flops is None:
            return
        seconds = max(done.ended - done.began - done.copy_in - done.copy_out, 1e-9)
        self._batch_size.observe(done.batch_size)
        self._batch_fill.observe(done.fill)
        self._flops.labels(backend).inc(done.flops)
        self._compute.labels(backend).inc(seconds)
        self._speed.set(done.flops / seconds / 1e12)
        if done.padding:
            self._padding.inc(done.padding)
        if done.splits:
            self._splits.inc(done.splits)

    def holding_changed(self, engine: Engine, holding: Holding) -> None:
        for name, metric in self._holding.items():
            metric.labels(engine.process[0]).set(getattr(holding, name))

    def cache_limit(self, engine: str, nbytes: int) -> None:
        """Set the metric of how many bytes of KV caches and saved forwards an engine may hold."""
        self._cache_limit.labels(engine).set(nbytes)

    def verified(self, about: AnswerVerified) -> None:
        self._later(self._verified.labels(about.backend, about.dtype, about.direction, about.result).inc)

    def kernels_off(self, engine: str, off: Mapping[str, str]) -> None:
        """Set the metric of the kernels that are switched off in an engine."""
        for name, reason in off.items():
            self._off.labels(engine, name, "setting" if reason == switches.SETTING else "check").set(1)

    def lost(self, engine: Engine) -> None:
        self._restarts.inc()
        self.holding_changed(engine, Holding(0, 0))

    def queue(self, **now: float) -> None:
        """Set the gauges of admitted requests to the values in `now`, whose names are the keys of `_queue`."""
        for name, value in now.items():
            self._queue[name].set(value)

    def ready(self, ready: bool) -> None:
        """Set whether this process accepts new work."""
        self._ready.set(ready)

    def certificate(self, expiry: float) -> None:
        """Set the Unix time at which the certificate in use expires."""
        self._certificate.set(expiry)

    def lag(self, seconds: float) -> None:
        """Record how late a timer of the event loop was."""
        self._lag.observe(seconds)

    def process(self, name: str, pid: int) -> None:
        """Set the id of a process; 0 means that it does not run."""
        self._processes.labels(name).set(pid)

    def dropped(self, process: str, lines: int) -> None:
        """Count dropped log lines of a process. A call with 0 creates the metric."""
        self._dropped.labels(process).inc(lines)

    def unanswered(self, connections: int) -> None:
        """Count connections that were closed at the server's stop without an answer to their request."""
        self._unanswered.inc(connections)

    def families(self) -> Iterable[Metric]:
        """Return the metrics of this process alone, as objects of prometheus_client."""
        return itertools.chain(
            self.registry.collect(), [build_info(None)], memory_metrics(), used({"http-0": os.getpid()})
        )

    def exposition(self, device: DeviceInfo | None) -> bytes:
        """Return the metrics of all processes in Prometheus' text format."""
        counted = list(self.everywhere().collect())
        ids = (sample for family in counted if family.name == _PROCESS_ID for sample in family.samples)
        processes = {sample.labels["process"]: int(sample.value) for sample in ids if sample.value}
        return generate_latest(_Collected([*counted, build_info(device), *memory_metrics(), *used(processes)]))

    def everywhere(self) -> CollectorRegistry:
        """Return a registry with the counts of all HTTP processes."""
        if self._counted is None and MULTIPROCESS not in os.environ:
            return self.registry
        registry = CollectorRegistry()
        if self._counted is not None:
            registry.register(SharedCollector(self._counted))
            return registry
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry


class _Collected(Collector):
    """A collector that returns given metrics, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
