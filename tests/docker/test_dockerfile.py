"""Checks of the texts of Dockerfile, .dockerignore and compose.yaml, which need no Docker.

`make image-test` builds and runs the image (test_image.py).
"""

import fnmatch
import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from flashpoint.commands.registry import COMMANDS
from flashpoint_server.config.settings import Settings
from tests.docker.engine import ROOT, steps


def instructions(dockerfile):
    """Return (keyword, arguments) of each instruction of a Dockerfile, without comments and line continuations."""
    text = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = instructions((ROOT / "Dockerfile").read_text())


def every(word, stage=None):
    """Return the arguments of each instruction with the keyword `word`, in the given stage or in all stages."""
    arguments, now = [], None
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            now = rest.partition(" AS ")[2]
        if name == word and stage in (None, now):
            arguments.append(rest)
    return arguments


def ignored(path):
    """Return whether .dockerignore excludes `path`: the last matching pattern decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        if pattern == "**" or fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/"):
            out = not line.startswith("!")
    return out


def test_the_linter_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    run = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def test_the_bases_are_of_exact_releases():
    bases = [rest.partition(" AS ")[0] for rest in every("FROM") if not rest.startswith("base-")]
    cuda, debian = bases
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.\d\d", cuda)
    assert re.fullmatch(r"debian:\d+\.\d+-slim", debian)
    assert every("ARG")[0] == "DEVICE=gpu"


def test_torch_is_pinned_and_in_a_layer_before_the_code():
    (install,) = [rest for rest in every("RUN", "build") if "torch" in rest and "ahead" not in rest]
    assert 'index="${TORCH_INDEX-$DEVICE_TORCH_INDEX}"' in install  # an empty argument means pip's default index
    assert '-c constraints.txt ${index:+--index-url "$index"} torch' in install
    build = INSTRUCTIONS[INSTRUCTIONS.index(("FROM", "base-${DEVICE} AS build")) :]
    assert build.index(("RUN", install)) < build.index(("COPY", "kernels kernels"))
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {"torch", "triton"} <= pinned


def test_all_that_is_copied_exists_and_is_sent_to_the_builder():
    sources = [source for copy in every("COPY") if "--from" not in copy for source in shlex.split(copy)[:-1]]
    assert {"contract", "client", "kernels", "server", "pyproject.toml", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored("tests")
    assert ignored(".git")
    assert (ROOT / "deploy/docker/entrypoint.sh").stat().st_mode & stat.S_IXOTH


def test_what_the_build_reads_is_copied_before_it():
    install = INSTRUCTIONS.index(next(i for i in INSTRUCTIONS if "server]" in i[1]))
    copied = {source for word, rest in INSTRUCTIONS[:install] if word == "COPY" for source in shlex.split(rest)[:-1]}
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt"}
    assert needed <= copied


def test_the_extras_that_it_installs_exist():
    extras = re.findall(r"\.\[([a-z,]+)\]", " ".join(every("RUN")))
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in PROJECT["optional-dependencies"]


def test_it_runs_as_a_user_of_its_own_with_what_triton_needs():
    (user,) = every("USER", "service")
    assert user.isdecimal()
    assert int(user) >= 1000
    assert {"gcc", "python3-dev"} <= set(" ".join(every("RUN", "base-gpu")).split())
    (made,) = every("RUN", "service")
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", " ".join(every("ENV", "service"))).group(1)
    assert f"--owner {user} {cache}" in made
    assert f"--uid {user}" in made


def test_kernels_are_compiled_into_what_the_entry_point_links():
    (compiled,) = [rest for rest in every("RUN", "build") if "ahead" in rest]
    assert "TRITON_CACHE_DIR=/opt/flashpoint/compiled" in compiled
    assert 'ARCHITECTURES="80 86 89 90 100"' in every("ENV", "base-gpu")
    assert "--from=build /opt/flashpoint/compiled /opt/flashpoint/compiled" in every("COPY", "service")
    assert "/opt/flashpoint/compiled/." in (ROOT / "deploy/docker/entrypoint.sh").read_text()


def test_the_entry_point_links_what_is_compiled_and_runs_the_command(tmp_path):
    """Kernels that Triton has compiled stay in its cache, and links from an earlier start do not break the next one."""
    compiled, cache = tmp_path / "compiled", tmp_path / "cache"
    (compiled / "key").mkdir(parents=True)
    (compiled / "key" / "kernel.cubin").write_text("the image's")
    (cache / "own").mkdir(parents=True)
    (cache / "own" / "kernel.cubin").write_text("compiled here")
    script = (ROOT / "deploy/docker/entrypoint.sh").read_text().replace("/opt/flashpoint/compiled", str(compiled))
    for _ in range(2):
        command = ["/bin/sh", "-c", script, "entrypoint", "echo", "served"]
        run = subprocess.run(command, env={"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=True)
        assert (run.stdout, run.stderr) == ("served\n", "")
    assert (cache / "key" / "kernel.cubin").read_text() == "the image's"
    assert (cache / "own" / "kernel.cubin").read_text() == "compiled here"


def test_the_health_check_asks_the_port_that_is_served():
    """`flashpoint health` finds the port in FLASHPOINT_PORT. Tests of tests/server/cli and config run this command."""
    (check,) = every("HEALTHCHECK")
    assert json.loads(check[check.index("[") :]) == ["flashpoint", "health"]
    assert "health" in COMMANDS
    (environment,) = every("ENV", "service")
    (port,) = every("EXPOSE")
    assert f"FLASHPOINT_PORT={port}" in environment
    assert "FLASHPOINT_HOST=0.0.0.0" in environment
    assert "FLASHPOINT_INSECURE=true" in environment  # `docker run` works without API keys; the log warns
    assert json.loads(every("CMD")[0]) == ["flashpoint", "serve"]
    assert "flashpoint" in PROJECT["scripts"]


def test_what_the_image_sets_is_a_setting(monkeypatch):
    (environment,) = every("ENV", "service")
    variables = dict(re.findall(r"(FLASHPOINT_\w+)=(\S+)", environment))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.host, settings.port, settings.insecure) == ("0.0.0.0", 8000, True)
    assert settings.model_fields_set - {"device"} == {"host", "port", "insecure"}


def test_labels_are_those_of_the_project():
    (labels,) = every("LABEL")
    assert f'licenses="{PROJECT["license"]}"' in labels


class Compose(yaml.SafeLoader):
    """A YAML loader that accepts the tag `!reset` of compose files."""


Compose.add_constructor("!reset", lambda loader, node: None)


def test_compose_names_what_is_there():
    compose = yaml.load((ROOT / "compose.yaml").read_text(), Compose)["services"]
    assert set(compose) == {"flashpoint", "prometheus", "grafana"}
    for service in compose.values():
        assert re.search(r":(v?\d+\.\d+\.\d+|\$\{DEVICE:-gpu\})$", service["image"])
        for volume in service.get("volumes", []):
            assert (ROOT / volume.partition(":")[0]).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    flashpoint = compose["flashpoint"]
    assert flashpoint["read_only"] is True
    assert any(mount.startswith("/var/cache/triton:exec") for mount in flashpoint["tmpfs"])
    cpu = yaml.load((ROOT / "deploy/docker/cpu.yaml").read_text(), Compose)["services"]
    assert cpu == {"flashpoint": {"deploy": None}}
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/flashpoint.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://flashpoint:9090"


def test_a_builders_log_has_the_seconds_of_each_instruction():
    log = (
        "#1 [internal] load build definition from Dockerfile\n#1 DONE 0.0s\n"
        "#4 [build  2/11] RUN apt-get update     && true\n#4 0.5 Reading\n#4 DONE 12.5s\n\n"
        "#5 [service 1/3] COPY a b\n#5 CACHED\n"
    )
    assert steps(log) == {"RUN apt-get update && true": 12.5}
