"""Tables of the server's metrics and of their labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric

from flashpoint_contract.options import BACKENDS
from flashpoint_server.http.ending import MALFORMED
from flashpoint_server.observability.metrics import ENDS, STAGES, Metrics
from flashpoint_server.oip.models import MODELS
from flashpoint_server.oip.statistics import Statistics

from .markdown import named, table


@named
def metrics() -> str:
    """Return every metric of /metrics, by the name that Prometheus shows, with its labels."""
    exported, families = _exported()
    rows = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in _labels(exported, family))
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return table(["metric", "type", "labels", "what"], rows)


@named
def labels() -> str:
    """Return every label with its values. Raises KeyError for a label without a description."""
    exported, families = _exported()
    found = {label for family in families for label in _labels(exported, family)}
    rows = [(f"`{label}`", values) for label, values in _values().items() if label in found]
    if missing := found - _values().keys():
        raise KeyError(f"labels without a description: {', '.join(sorted(missing))}")
    return table(["label", "values"], rows)


def _exported() -> tuple[Metrics, list[Metric]]:
    exported = Metrics()
    Statistics(exported.registry)
    return exported, list(exported.families())


def _labels(exported: Metrics, family: Metric) -> Iterable[str]:
    """Return the names of a metric's labels, without `le`, which the buckets of a histogram have."""
    collector = exported.registry._names_to_collectors.get(family.name)
    if collector is not None:
        return collector._labelnames  # type: ignore[attr-defined,no-any-return]
    return family.samples[0].labels  # a custom collector makes this metric at each scrape


def _values() -> dict[str, str]:
    """Return, by the label's name, the text that describes its values."""

    def words(values: Iterable[str]) -> str:
        return ", ".join(f"`{value}`" for value in values)

    return {
        "by": "`setting` (`--kernels-off`) or `check` (the one at an engine's start)",
        "dtype": "the data type of q",
        "direction": "`forward` or `backward`",
        "result": "`right`, `imprecise`, `wrong`, `ill_posed` or `skipped`",
        "kernel": "names of `--kernels-off`, such as `amx.backward` or `tiled`",
        "route": "the path of a call, with `*` for an id, such as `/caches/*/append`; `other`: pages, probes, "
        f"benchmarks and unknown paths; `{MALFORMED}`: a request that is not HTTP. Inference over gRPC is "
        "`/inference.GRPCInferenceService/ModelInfer`, and its other methods their path under `/v2`",
        "status": "HTTP's status; `499`: the client disconnected before the answer",
        "reason": "`ok`, or the [code](errors.md) of the error; `client_gone` with status 499",
        "key": "name of the API key",
        "how": f"`flashpoint_ended_total`: {words(ENDS)}; `flashpoint_model_…`: `success`, `fail`",
        "stage": f"{words(STAGES)}; `flashpoint_model_…`: `copy_in`, `compute`, `copy_out`",
        "backend": words(BACKENDS),
        "engine": "`engine-cpu`, `engine-cuda:0`, …",
        "process": "`http-0`, …; `json-0`, …, which read and write JSON; the engines, as in `engine`; `supervisor`, "
        "which starts the others if `--workers` is over 1",
        "model": words(MODELS),
        "size": "requests in the launch, a number",
        "version": "Flashpoint's version",
        "python": "Python's version",
        "torch": "torch's version, empty if it is not installed",
        "triton": "Triton's version, empty if it is not installed",
        "device": "`cpu`, `cuda:0`, …; empty before the engine is ready",
        "title": "the device's full name; empty before the engine is ready",
    }
