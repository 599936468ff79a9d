"""The Helm chart gives valid manifests that fit the server and the image, and refuses bad values.

`make charts` rewrites deploy/helm/validated.txt, the report of the validation.
"""

import copy
import inspect
import itertools
import json
import re
import shutil
import subprocess

import jsonschema
import pytest
import yaml

from flashpoint_server.cli import supervisor
from flashpoint_server.config import settings
from flashpoint_server.config.settings import Settings
from flashpoint_server.observability.metrics import Metrics
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.processes import processes

charts = pytest.importorskip(
    "tests.support.charts",
    reason="pip install helm-python-sdk (not built for all platforms)",
)
from tests.support.charts import CHART, DEPLOY, EXAMPLES, NEWEST, VALIDATED, report, validate  # noqa: E402

ROOT = DEPLOY.parent
EVERYTHING = EXAMPLES["everything"]
KEDA = {"autoscaling": EXAMPLES["keda"]["autoscaling"]}


def render(values=None, *how, **named):
    """Render the chart with `values`. The server needs no API keys unless `values` sets `insecure` to false."""
    return charts.render({"insecure": True, **(values or {})}, *how, **named)


def of_kind(manifests, kind):
    (one,) = [m for m in manifests if m["kind"] == kind and not m["metadata"]["name"].endswith("-dashboard")]
    return one


def pod(values=None):
    return of_kind(render(values), "Deployment")["spec"]["template"]["spec"]


def container(values=None):
    return pod(values)["containers"][0]


def exported():
    """Return the name of every time series in /metrics."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    metrics = Metrics()
    Statistics(metrics.registry)
    return {family.name + suffix for family in metrics.families() for suffix in suffixes[family.type]}


@pytest.mark.slow
def test_what_helm_renders_is_what_was_validated():
    assert VALIDATED.read_text() == report(), "run make charts"


@pytest.mark.slow
def test_what_helm_renders_is_valid_and_a_misspelt_field_would_be_seen():
    for manifest in render(EVERYTHING) + render(KEDA):
        validate(manifest, NEWEST)
        for place in {"metadata", "spec"} & manifest.keys():
            wrong = copy.deepcopy(manifest)
            wrong[place]["mispelt"] = 1
            with pytest.raises(jsonschema.ValidationError, match="mispelt"):
                validate(wrong, NEWEST)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"queue_limt": 3}}, "queue_limt"),
        ({"settings": {"queue_limit": 0}}, "/settings/queue_limit"),
        ({"settings": {"shutdown_timeout": 0}}, "/settings/shutdown_timeout"),
        ({"settings": {"log_format": "xml"}}, "/settings/log_format"),
        ({"settings": {"workers": None}}, "workers"),
        ({"settings": {"port": 9000}}, "port"),
        ({"settings": {"device": "cuda"}}, "device"),
        ({"settings": {"api_keys": "SECRET"}}, "api_keys"),
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "/replicas"),
        ({"gpu": {"count": "one"}}, "/gpu/count"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"preStopSeconds": -1}, "/preStopSeconds"),
        ({"rollingUpdate": {"maxUnavailable": 0, "maxSurge": "0%"}}, "/rollingUpdate"),
        ({"autoscaling": {"kind": "cpu"}}, "/autoscaling/kind"),
        ({"autoscaling": {"kind": "keda"}}, "/autoscaling/prometheusAddress"),
        ({"autoscaling": {"kind": "hpa", "queueBytes": 0, "queueSeconds": 0}}, "/autoscaling"),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5, "maxReplicas": 4}}, "autoscaling.maxReplicas"),
        ({"settings": {"otlp_endpoint": "http://collector:4318"}}, "networkPolicy.egress"),
        ({"apiKeys": {"fileKey": "keys.toml"}}, "apiKeys.fileKey"),
        ({"insecure": False}, "apiKeys.secret: empty, so that nobody is asked for a key"),
        ({"insecure": "yes"}, "/insecure"),
        ({"settings": {"insecure": True}}, "insecure"),
        ({"settings": {"replica": "one-name-for-all"}}, "replica"),
        ({"settings": {"cache_secret": "SECRET"}}, "cache_secret"),
        ({"service": {"sessionAffinity": "Cookie"}}, "/service/sessionAffinity"),
        ({"settings": {"host": "127.0.0.1"}}, "settings.host"),
        ({"settings": {"host": "localhost"}}, "settings.host"),
        ({"settings": {"grpc_port": 0}}, "settings.grpc_port"),
        ({"settings": {"grpc_port": 8000}, "service": {"port": 80}}, "settings.grpc_port"),
        ({"settings": {"grpc_port": 9001}, "service": {"port": 9001}}, "settings.grpc_port"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_values_that_cannot_work_are_refused_by_name(values, message):
    with pytest.raises(charts.helm_python.HelmError, match=re.escape(message)):
        render(values)


@pytest.mark.parametrize(("shutdown", "pre_stop"), [*itertools.product([0.5, 30, 90.5, 86400], [0, 10, 300])])
def test_a_pod_may_drain_for_as_long_as_its_server_does(shutdown, pre_stop):
    spec = pod({"settings": {"shutdown_timeout": shutdown}, "preStopSeconds": pre_stop})
    hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert hook == ["sleep", str(pre_stop)]
    longest = shutdown + supervisor._WORKER_MARGIN + processes.ENGINE_PATIENCE
    assert spec["terminationGracePeriodSeconds"] > pre_stop + longest


MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "processes"),
    [
        ({}, 256 + 112 * 32),
        ({"grpc_port": 8001}, 6144 + 256 + 112 * 32),
        (
            {"workers": 4, "staging_bytes": 8 << 30, "queue_bytes": 1 << 30, "cache_bytes": 0, "json_limit": MIB},
            4 * (256 + 112),
        ),
        ({"workers": 3, "staging_bytes": (64 << 20) + 1, "grpc_port": 8001, "grpc_bytes": 64 << 20}, 64 + 3 * 3840),
    ],
)
def test_a_pods_memory_has_room_for_all_that_its_settings_allow(given, processes):
    """The pod's memory limit follows the formula of docs/kubernetes.md. `processes`: its terms for workers and gRPC."""
    resources = container({"settings": given, "memory": {"processesMiB": 2048}})["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    memory = int(resources["limits"]["memory"].removesuffix("Mi"))
    sizes = ("staging_bytes", "queue_bytes", "cache_bytes")
    bounded = sum(given.get(name, Settings.model_fields[name].default) for name in sizes)
    assert memory == -(-bounded // MIB) + processes + 2048


def test_without_keys_everybody_is_served_by_choice_alone():
    assert of_kind(render(), "ConfigMap")["data"]["FLASHPOINT_INSECURE"] == "true"
    locked = charts.render(EXAMPLES["keys"])
    assert of_kind(locked, "ConfigMap")["data"]["FLASHPOINT_INSECURE"] == "false"  # overrides the image's `true`
    for name, values in EXAMPLES.items():
        assert charts.render(values), name


@pytest.mark.parametrize("name", ["defaults", *EXAMPLES])
def test_the_server_reads_the_settings_as_they_were_given(name, monkeypatch):
    values = EXAMPLES.get(name, {})
    variables = of_kind(render(values), "ConfigMap")["data"]
    for variable, value in variables.items():
        assert variable.removeprefix("FLASHPOINT_").lower() in Settings.model_fields
        monkeypatch.setenv(variable, value)
    read = Settings()
    assert read.insecure is True
    given = {**yaml.safe_load((CHART / "values.yaml").read_text())["settings"], **values.get("settings", {})}
    assert {name: getattr(read, name) for name in given} == given
    assert (read.port, read.device) == (
        8000,
        {0: "cpu", 1: "cuda"}.get(values.get("gpu", {}).get("count", 0), "all"),
    )


def test_the_settings_that_the_chart_says_are_the_servers_own_defaults():
    chart_settings = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]
    assert chart_settings.pop("host") == "0.0.0.0"
    assert chart_settings == {name: Settings.model_fields[name].default for name in chart_settings}


def test_it_runs_as_the_image_is_made():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    (port,) = re.findall(r"^EXPOSE (\d+)$", dockerfile, re.MULTILINE)
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(/var\S+)", dockerfile)
    spec = pod()
    assert {spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
    one = spec["containers"][0]
    assert one["ports"][0] == {"name": "http", "containerPort": int(port)}
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["mountPath"] for mount in one["volumeMounts"]} == {"/tmp", cache}
    assert "command" not in one  # it would replace the image's entry point, which links the compiled kernels
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False


def test_a_gpu_is_asked_for_and_tolerated():
    assert "tolerations" not in pod()
    spec = pod({"gpu": {"count": 2}})
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_keys_come_from_a_secret_and_prometheus_has_its_own():
    manifests = render(EXAMPLES["keys"])
    assert not [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    server_key, key = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert server_key["name"] == "FLASHPOINT_REPLICA"
    source = {"name": "flashpoint-keys", "key": "api-keys"}
    assert key == {"name": "FLASHPOINT_API_KEYS", "valueFrom": {"secretKeyRef": source}}
    (endpoint,) = of_kind(manifests, "ServiceMonitor")["spec"]["endpoints"]
    credentials = {"name": "flashpoint-keys", "key": "metrics-key"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": credentials}


def test_keys_with_limits_come_in_a_file_of_the_secret():
    spec = pod({"apiKeys": {"secret": "flashpoint-keys", "fileKey": "keys.toml"}})
    (one,) = spec["containers"]
    (mount,) = [mount for mount in one["volumeMounts"] if mount["name"] == "keys"]
    (volume,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys"]
    (item,) = volume["items"]
    assert (volume["secretName"], item["key"]) == ("flashpoint-keys", "keys.toml")
    assert one["env"][1:] == [{"name": "FLASHPOINT_API_KEYS_FILE", "value": f"{mount['mountPath']}/{item['path']}"}]
    assert "api_keys_file" in Settings.model_fields


def test_pods_have_names_and_share_the_secret_of_their_caches():
    (pod_name,) = container()["env"]
    assert pod_name == {"name": "FLASHPOINT_REPLICA", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    _, secret = container({"caches": {"secret": "flashpoint-caches"}})["env"]
    source = {"name": "flashpoint-caches", "key": "cache-secret"}
    assert secret == {"name": "FLASHPOINT_CACHE_SECRET", "valueFrom": {"secretKeyRef": source}}
    assert {"replica", "cache_secret"} <= Settings.model_fields.keys()
    services = [of_kind(render(values), "Service")["spec"] for values in ({}, EVERYTHING)]
    assert [service["sessionAffinity"] for service in services] == ["None", "ClientIP"]


def test_grpc_has_a_port_wherever_http_has_one():
    manifests = render({"settings": {"grpc_port": 9001}})
    container = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "grpc", "containerPort": 9001} in container["ports"]
    ports = of_kind(manifests, "Service")["spec"]["ports"]
    assert [(port["name"], port["port"], port["targetPort"]) for port in ports] == [
        ("http", 8000, "http"),
        ("grpc", 9001, "grpc"),
    ]
    (rule,) = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}, {"port": "grpc"}]


def test_the_image_has_the_extras_that_settings_ask_for():
    extras = set(re.findall(r"how_to_install\(.(\w+).\)", inspect.getsource(settings)))
    (installed,) = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert extras
    assert extras <= set(installed.split(","))


@pytest.mark.parametrize("release", ["flashpoint", "prod", "a-flashpoint-of-another-name", "x" * 53])
def test_its_parts_find_each_other(release):
    manifests = render(EVERYTHING, release)
    deployment, service = of_kind(manifests, "Deployment"), of_kind(manifests, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        of_kind(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    monitor = of_kind(manifests, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "flashpoint"  # the job of the alert FlashpointDown
    assert (
        of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        == deployment["metadata"]["name"]
    )
    assert "replicas" not in deployment["spec"]
    assert all(len(manifest["metadata"]["name"]) <= 63 for manifest in manifests)
    for place in ("podAnnotations", "podLabels"):
        field = place.removeprefix("pod").lower()
        assert EVERYTHING[place].items() <= deployment["spec"]["template"]["metadata"][field].items()


def test_what_scales_it_is_exported():
    hpa = of_kind(render(EXAMPLES["hpa"]), "HorizontalPodAutoscaler")
    metrics = {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]}
    triggers = of_kind(render(KEDA), "ScaledObject")["spec"]["triggers"]
    assert metrics == {
        name for trigger in triggers for name in re.findall(r"flashpoint_\w+", trigger["metadata"]["query"])
    }
    assert metrics <= exported()
    (rule,) = yaml.safe_load((DEPLOY / "helm/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert {name for name in exported() if re.fullmatch(pattern, name)} == metrics


def test_alerts_and_dashboard_are_those_of_this_repository():
    manifests = render(EVERYTHING)
    rules = of_kind(manifests, "PrometheusRule")["spec"]
    assert rules == yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    named = set(re.findall(r"flashpoint_\w+", json.dumps([r["expr"] for g in rules["groups"] for r in g["rules"]])))
    assert named <= exported()
    (dashboard,) = [manifest for manifest in manifests if manifest["metadata"]["name"].endswith("-dashboard")]
    assert json.loads(dashboard["data"]["flashpoint.json"]) == json.loads(
        (DEPLOY / "grafana/flashpoint.json").read_text()
    )


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="install Debian's package prometheus (apt-get install prometheus): it has promtool",
)
def test_prometheus_can_read_what_keda_asks_it(tmp_path):
    triggers = of_kind(render(KEDA), "ScaledObject")["spec"]["triggers"]
    rules = [{"record": f"asked{n}", "expr": trigger["metadata"]["query"]} for n, trigger in enumerate(triggers)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    ran = subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_package_of_the_chart_has_all_that_the_folder_has(tmp_path):
    """The chart's folder has symbolic links to the alerts and the dashboard. The package has copies of these files."""
    packed = charts.helm_python.package(CHART, destination=tmp_path)
    charts.helm_python.expand(tmp_path, packed)
    assert not [path for path in (tmp_path / "flashpoint").rglob("*") if path.is_symlink()]
    assert render(EVERYTHING, folder=tmp_path / "flashpoint") == render(EVERYTHING)
