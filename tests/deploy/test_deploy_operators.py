"""The examples for KubeRay and KServe are valid.

No package has the schemas of RayService and InferenceService, so this file defines them after the operators' API types.
They refuse unknown fields. Kubernetes' schemas validate the pods. One test compares COMPONENT with KServe's models.
"""

import ast
import copy
import re
import subprocess
import sys
import zipfile

import jsonschema
import pytest
import yaml

charts = pytest.importorskip(
    "tests.support.charts",
    reason="pip install helm-python-sdk (not built for all platforms)",
)
from tests.support.charts import DEPLOY, NEWEST, OLDEST, validate  # noqa: E402

RAY = yaml.safe_load((DEPLOY / "kuberay/rayservice.yaml").read_text())
KSERVE = yaml.safe_load((DEPLOY / "kserve/inferenceservice.yaml").read_text())
DOCKERFILE = (DEPLOY.parent / "Dockerfile").read_text()
USER = re.compile(r"^USER (\d+)$", re.MULTILINE)


def of(required, **fields):
    """Return a schema of an object with only these fields."""
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


COUNT = {"type": "integer", "minimum": 0}
WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
POD = {"type": "object"}  # `validate_pod` applies Kubernetes' schema
META = of(["name"], name={"type": "string"}, namespace={"type": "string"}, labels=WORDS, annotations=WORDS)
HEAD = of(["rayStartParams", "template"], rayStartParams=WORDS, template=POD, serviceType={"type": "string"})
WORKERS = of(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName={"type": "string"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    rayStartParams=WORDS,
    template=POD,
)
RAY_SERVICE = of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=META,
    spec=of(
        ["rayClusterConfig", "serveConfigV2"],
        serveConfigV2={"type": "string"},
        excludeHeadPodFromServeSvc={"type": "boolean"},
        upgradeStrategy=of(["type"], type={"enum": ["NewCluster", "None"]}),
        rayClusterConfig=of(
            ["headGroupSpec", "workerGroupSpecs"],
            rayVersion={"type": "string"},
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=HEAD,
            workerGroupSpecs={"type": "array", "items": WORKERS},
        ),
    ),
)
# Fields of a KServe predictor that are not fields of a pod, and that the examples may use.
COMPONENT = {
    "minReplicas": COUNT,
    "maxReplicas": COUNT,
    "timeout": COUNT,
    "containerConcurrency": COUNT,
    "canaryTrafficPercent": {"type": "integer", "minimum": 0, "maximum": 100},
    "scaleTarget": COUNT,
    "scaleMetric": {"enum": ["cpu", "memory", "concurrency", "rps"]},
}
INFERENCE_SERVICE = of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "serving.kserve.io/v1beta1"},
    kind={"const": "InferenceService"},
    metadata=META,
    spec=of(["predictor"], predictor={"type": "object", "required": ["containers"], "properties": COMPONENT}),
)


def validate_pod(spec):
    template = {"metadata": {}, "spec": spec}
    for kubernetes in (OLDEST, NEWEST):
        validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}, kubernetes)


def validate_ray(manifest):
    jsonschema.validate(manifest, RAY_SERVICE)
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        validate_pod(group["template"]["spec"])


def validate_kserve(manifest):
    jsonschema.validate(manifest, INFERENCE_SERVICE)
    validate_pod({key: value for key, value in manifest["spec"]["predictor"].items() if key not in COMPONENT})


@pytest.mark.parametrize(
    ("manifest", "check", "places"),
    [
        (RAY, validate_ray, ["", "spec", "spec.rayClusterConfig", "spec.rayClusterConfig.headGroupSpec.template.spec"]),
        (KSERVE, validate_kserve, ["", "metadata", "spec", "spec.predictor"]),
    ],
    ids=["kuberay", "kserve"],
)
def test_the_example_is_valid_and_a_misspelt_field_would_be_seen(manifest, check, places):
    check(manifest)
    for place in places:
        wrong = copy.deepcopy(manifest)
        inner = wrong
        for key in filter(None, place.split(".")):
            inner = inner[key]
        inner["mispelt"] = 1
        with pytest.raises(jsonschema.ValidationError, match="mispelt"):
            check(wrong)


def test_it_serves_as_a_cluster_of_ray_without_kubernetes_does():
    """The RayService has the configuration of deploy/ray/cluster.yaml, which tests/ray validates with Ray's schema."""
    assert yaml.safe_load(RAY["spec"]["serveConfigV2"]) == yaml.safe_load((DEPLOY / "ray/cluster.yaml").read_text())


def test_the_cluster_runs_the_release_of_ray_that_the_image_has():
    pinned = dict(
        line.split("==") for line in (DEPLOY.parent / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert RAY["spec"]["rayClusterConfig"]["rayVersion"] == pinned["ray"]
    made = (DEPLOY / "kuberay/Dockerfile").read_text()
    assert "COPY constraints.txt" in made
    assert (
        re.findall(r"^USER (\d+)$", made, re.MULTILINE)[-1] == re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[1]
    )


def containers():
    cluster = RAY["spec"]["rayClusterConfig"]
    pods = [group["template"]["spec"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
    return [(pod, pod["containers"][0]) for pod in [*pods, KSERVE["spec"]["predictor"]]]


def test_every_pod_is_the_images_user_and_reads_no_services_port():
    user = int(USER.search(DOCKERFILE)[1])
    for pod, container in containers():
        assert pod["securityContext"]["runAsUser"] == user
        assert pod["enableServiceLinks"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@pytest.mark.full
def test_kserve_has_the_fields_that_the_schema_says(tmp_path):
    """COMPONENT agrees with the models of the package kserve. It is not installed, as its pins conflict with ours."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "kserve==0.21.0"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("kserve-*.whl")
    with zipfile.ZipFile(wheel) as package:
        source = package.read("kserve/models/v1beta1_predictor_spec.py").decode()
    names = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names[node.targets[0].id] = ast.literal_eval(node.value)
    types = {json_name: names["openapi_types"][name] for name, json_name in names["attribute_map"].items()}
    assert COMPONENT.keys() | KSERVE["spec"]["predictor"].keys() <= types.keys()
    integers = {name for name, schema in COMPONENT.items() if schema.get("type") == "integer"}
    assert {types[name] for name in integers} == {"int"}
