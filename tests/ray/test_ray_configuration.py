"""The files of deploy/ray fit Ray's schema, and `flashpoint_server.ray.app` refuses arguments that it cannot use."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import ValidationError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy/ray"


@pytest.fixture(scope="module")
def ray():
    """Yield Ray's schema of a Serve configuration and our function `app`. Warnings of Ray's code are suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve.schema as schema

        import flashpoint_server.ray as ours

        yield SimpleNamespace(schema=schema.ServeDeploySchema, app=ours.app)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("FLASHPOINT_DEVICE", "FLASHPOINT_PORT"):
        monkeypatch.delenv(name, raising=False)


def deployment(application):
    return application._bound_deployment


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_is_as_ray_wants_it_and_builds(ray, path):
    deploy = ray.schema.model_validate(yaml.safe_load(path.read_text()))
    (application,) = deploy.applications
    assert application.import_path == "flashpoint_server.ray:app"
    built = deployment(ray.app(application.args))
    assert [d.name for d in application.deployments] == [built.name]
    assert built.ray_actor_options["num_gpus"] == 1


def test_there_are_files():
    assert {path.stem for path in DEPLOY.glob("*.yaml")} == {"one-node", "cluster"}


@pytest.mark.filterwarnings("ignore")
def test_ray_lets_in_what_we_refuse_and_waits_for_what_we_answer(ray):
    built = deployment(ray.app({"queue_limit": "7", "shutdown_timeout": "90"}))
    assert built.max_ongoing_requests == 14
    assert built.backpressure_config.retry_after_s == 1
    assert built._deployment_config.graceful_shutdown_timeout_s > 90
    assert built.ray_actor_options["num_gpus"] == 0


@pytest.mark.filterwarnings("ignore")
def test_variables_are_settings_too(ray, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_DEVICE", "cuda")
    assert deployment(ray.app({})).ray_actor_options["num_gpus"] == 1
    assert deployment(ray.app({"device": "cpu"})).ray_actor_options["num_gpus"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"port": "8001"}, "port"),
        ({"workers": 4}, "workers"),
        ({"shared_memory_bytes": 1}, "shared_memory_bytes"),
        ({"header_timeout": 3}, "header_timeout"),
        ({"device": "cuda:1"}, "device"),
        ({"device": "all"}, "device"),
        ({"queue_limt": 1}, "queue_limt"),
        ({"queue_limit": 0}, "queue_limit"),
    ],
)
def test_what_is_no_setting_here_is_named(ray, arguments, named):
    with pytest.raises((ValueError, ValidationError), match=named):
        ray.app(arguments)


def test_a_variable_that_is_no_setting_here_is_named(ray, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_WORKERS", "2")
    with pytest.raises(ValueError, match="workers: cannot be set on Ray Serve"):
        ray.app({})


@pytest.mark.filterwarnings("ignore")
def test_the_variables_of_the_image_are_no_obstacle(ray, monkeypatch):
    """`app` ignores variables for the socket of `flashpoint serve`, because its Docker image sets them."""
    for name, value in (("HOST", "0.0.0.0"), ("PORT", "8000"), ("INSECURE", "true")):
        monkeypatch.setenv(f"FLASHPOINT_{name}", value)
    assert deployment(ray.app({}))
    with pytest.raises(ValueError, match="insecure: cannot be set on Ray Serve"):
        ray.app({"insecure": True})
