"""The manifests of docs/kubernetes.md and deploy/kubernetes/ are valid, and the files that the page names exist."""

import json
import re

import pytest
import yaml

from tests.support.balancer import REPLICA

charts = pytest.importorskip(
    "tests.support.charts",
    reason="pip install helm-python-sdk (not built for all platforms)",
)

PAGE = (charts.DEPLOY.parent / "docs/kubernetes.md").read_text()
FILES = sorted((charts.DEPLOY / "kubernetes").glob("*.yaml"))
SHOWN = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = [yaml.safe_load(text) for text in [*SHOWN, *(path.read_text() for path in FILES)]]


@pytest.mark.slow
def test_the_yaml_is_valid():
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        if block.get("kind") == "HTTPRoute":  # no Python package has the schemas of the Gateway API
            continue
        manifests = [block] if "apiVersion" in block else charts.render({"insecure": True, **block})
        for manifest in manifests:
            charts.validate(manifest, charts.NEWEST)


def test_the_ingress_reaches_the_service():
    (ingress,) = [block for block in BLOCKS if block.get("kind") == "Ingress"]
    (service,) = [manifest for manifest in charts.render({"insecure": True}) if manifest["kind"] == "Service"]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    backend = path["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def test_the_route_of_the_gateway_api_keeps_calls_at_the_pod_that_the_header_names():
    (route,) = [block for block in BLOCKS if block.get("kind") == "HTTPRoute"]
    (service,) = [manifest for manifest in charts.render({"insecure": True}) if manifest["kind"] == "Service"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert rule["sessionPersistence"] == {"type": "Header", "sessionName": REPLICA}


def test_the_values_and_the_files_that_it_names_are_there():
    schema = json.loads((charts.CHART / "values.schema.json").read_text())["properties"]
    sections = "|".join(name for name in schema if schema[name].get("properties"))
    named = re.findall(rf"`({sections})\.(\w+)", PAGE)
    assert len(named) > 10
    assert not [(section, field) for section, field in named if field not in schema[section]["properties"]]
    files = set(re.findall(r"deploy/[\w./-]+", PAGE))
    assert files
    assert not [name for name in files if not (charts.DEPLOY.parent / name).exists()]
    examples = re.search(r"values to begin with: (.+?)\.\n", PAGE, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", examples)) == set(charts.EXAMPLES)
