"""Render the Helm chart as Helm does, and validate its manifests with the schemas of their kinds.

`python tests/support/charts.py` writes a report of what it validated to deploy/helm/validated.txt (`make charts`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "flashpoint"
VALIDATED = DEPLOY / "helm" / "validated.txt"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "helm/examples").glob("*.yaml"))}
OLDEST, NEWEST = "1.27", "1.37"  # versions of Kubernetes: Chart.yaml's minimum; kubernetes_validate's newest schema
MODELS = {
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}


def render(
    values: dict[str, Any] | None = None, release: str = "flashpoint", folder: Path = CHART
) -> list[dict[str, Any]]:
    """Return the manifests of `helm template RELEASE FOLDER --namespace serving`, without the chart's notes."""
    with helm_python.Chart.load(folder) as chart:
        files = chart.render(values or {}, name=release, namespace="serving")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest is not None]


def validate(manifest: dict[str, Any], kubernetes: str) -> None:
    """Raise jsonschema.ValidationError if a field is unknown to its kind, is missing, or has another type."""
    if manifest["kind"] in MODELS:
        jsonschema.Draft202012Validator(_strict_schema(manifest["kind"])).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)


@cache
def _strict_schema(kind: str) -> Any:
    models = import_module(MODELS[kind])  # imported only here, because the import takes seconds
    return _closed(getattr(models, kind).model_json_schema(by_alias=True))


def _closed(schema: Any) -> Any:
    """Return the schema, changed to refuse fields that it does not name."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and schema.get("properties"):
        closed.setdefault("additionalProperties", False)
    return closed


def report() -> str:
    """Lint and validate the chart with its defaults and with each file of deploy/helm/examples/; return a report."""
    keda, operator = (version(f"cloudcoil.models.{name}") for name in ("keda", "prometheus_operator"))
    lines = [
        f"Helm {helm_python.helm_sdk_version()}; schemas of Kubernetes {OLDEST} and {NEWEST}, of KEDA {keda}, of the "
        f"Prometheus operator {operator}, which refuse any field that they do not name",
    ]
    for name, values in {"defaults": {"insecure": True}, **EXAMPLES}.items():
        warnings = [m["error"] for m in helm_python.lint(CHART, values, strict=True)["messages"] if m["severity"] > 1]
        manifests = render(values)
        for manifest in manifests:
            for kubernetes in (OLDEST, NEWEST):
                validate(manifest, kubernetes)
        kinds = ", ".join(sorted(manifest["kind"] for manifest in manifests))
        lines.append(f"{name}: lint {warnings or 'clean'}; valid: {kinds}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    VALIDATED.write_text(report())
    print(VALIDATED.read_text(), end="")
