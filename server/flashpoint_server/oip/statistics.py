"""Statistics of the protocol's models, from metrics of all HTTP processes, in the format of Triton's `model_stats`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric

# Triton's names of the stages of a launch, and the names in what `write` of routes/pipeline.py returns.
_STAGES = {"compute_input": "copy_in", "compute_infer": "compute", "compute_output": "copy_out"}


class Statistics:
    """The counters of all models. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"flashpoint_model_{name}", help_, ("model", *labels), registry=registry)

        self._requests = counter("requests", "Inference requests (/v2, gRPC) by result: success or fail", "how")
        self._seconds = counter(
            "request_seconds", "Seconds from an inference request's head to the end of its answer", "how"
        )
        self._queue = counter("queue_seconds", "Seconds in the queue of successful inference requests")
        self._batched = counter("batched_requests", "Successful inference requests by the size of their launch", "size")
        self._stages = counter(
            "stage_seconds",
            "Seconds of each stage of successful inference requests, by the size of their launch",
            "size",
            "stage",
        )
        self._last = Gauge(
            "flashpoint_model_last_seconds",
            "Unix time of the last successful inference request",
            ("model",),
            registry=registry,
            multiprocess_mode="max",
        )

    def ended(self, model: str, success: bool, seconds: float) -> None:
        """Count a request that has ended, and the `seconds` that it took."""
        how = "success" if success else "fail"
        self._requests.labels(model, how).inc()
        self._seconds.labels(model, how).inc(seconds)
        if success:
            self._last.labels(model).set(time.time())

    def computed(self, model: str, batch_size: int, stages: Mapping[str, float]) -> None:
        """Count the launch size and the seconds by stage of a successful request."""
        self._queue.labels(model).inc(stages["queue"])
        self._batched.labels(model, str(batch_size)).inc()
        for stage in _STAGES.values():
            self._stages.labels(model, str(batch_size), stage).inc(stages[stage])


def model_stats(model: str, version: str, metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return a model's entry in `model_stats`, from the metrics of all processes. Times are in nanoseconds."""
    counts: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name.startswith("flashpoint_model_") and sample.labels["model"] == model:
                labels = tuple(sample.labels[name] for name in ("how", "size", "stage") if name in sample.labels)
                name = sample.name.removeprefix("flashpoint_model_").removesuffix("_total")
                counts.setdefault(name, {})[labels] = sample.value

    def of(name: str, *labels: str) -> float:
        return counts.get(name, {}).get(labels, 0.0)

    def duration(count: float, seconds: float) -> dict[str, int]:
        return {"count": int(count), "ns": round(seconds * 1e9)}

    sizes = {
        size: int(of("batched_requests", str(size)))
        for size in sorted(int(s) for (s,) in counts.get("batched_requests", {}))
    }
    # A launch of n requests is counted n times, once by each request.
    launches = {size: -(-count // size) for size, count in sizes.items()}
    batches = [
        {
            "batch_size": size,
            **{name: duration(count, of("stage_seconds", str(size), stage) / size) for name, stage in _STAGES.items()},
        }
        for size, count in launches.items()
    ]
    succeeded = of("requests", "success")
    return {
        "name": model,
        "version": version,
        "last_inference": int(of("last_seconds") * 1000),
        "inference_count": int(succeeded),
        "execution_count": sum(launches.values()),
        "inference_stats": {
            "success": duration(succeeded, of("request_seconds", "success")),
            "fail": duration(of("requests", "fail"), of("request_seconds", "fail")),
            "queue": duration(succeeded, of("queue_seconds")),
            **{
                name: duration(succeeded, sum(of("stage_seconds", str(size), stage) for size in sizes))
                for name, stage in _STAGES.items()
            },
            "cache_hit": duration(0, 0),
            "cache_miss": duration(0, 0),
        },
        "batch_stats": batches,
        "memory_usage": [],
    }
