"""What can be known of the image without building it."""

import ast
import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions():
    """(word, rest) of each instruction, continued lines joined, comments dropped."""
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


INSTRUCTIONS = instructions()


def every(word):
    return [rest for name, rest in INSTRUCTIONS if name == word]


def ignored(path):
    """Whether .dockerignore keeps `path` out: the last pattern that matches decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        if pattern == "**" or fnmatch.fnmatch(path, pattern) or path.startswith(f"{pattern}/"):
            out = not line.startswith("!")
    return out


def test_the_base_is_a_cuda_runtime_of_an_exact_release():
    (base,) = every("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d\d\.\d\d", base)


def test_torch_is_pinned_and_in_a_layer_before_the_code():
    (install,) = [rest for rest in every("RUN") if "torch triton" in rest]
    assert "pip install -c constraints.txt torch triton" in install
    assert INSTRUCTIONS.index(("RUN", install)) < INSTRUCTIONS.index(("COPY", "kernels kernels"))
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {"torch", "triton"} <= pinned


def test_all_that_is_copied_exists_and_is_sent_to_the_builder():
    sources = [source for copy in every("COPY") for source in shlex.split(copy)[:-1]]
    assert {"client", "kernels", "server", "pyproject.toml", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert ignored("tests")
    assert ignored(".git")


def test_what_the_build_reads_is_copied_before_it():
    install = INSTRUCTIONS.index(next(i for i in INSTRUCTIONS if "[server]" in i[1]))
    copied = {source for word, rest in INSTRUCTIONS[:install] if word == "COPY" for source in shlex.split(rest)[:-1]}
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt"}
    assert needed <= copied


def test_the_extras_that_it_installs_exist():
    extras = re.findall(r"\.\[([a-z,]+)\]", " ".join(every("RUN")))
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in PROJECT["optional-dependencies"]


def test_it_runs_as_a_user_of_its_own_with_what_triton_needs():
    words = [word for word, _ in INSTRUCTIONS]
    (user,) = every("USER")
    assert user not in ("root", "0")
    assert words.index("USER") < words.index("COPY")
    assert {"gcc", "python3-dev"} <= set(" ".join(every("RUN")).split())
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", every("ENV")[0]).group(1)
    (made,) = [run for run in every("RUN") if "useradd" in run]
    assert f"--owner {user}" in made
    assert cache in made


def test_the_health_check_asks_the_port_that_is_served():
    (check,) = every("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    ast.parse(command[2])
    assert "/health/live" in command[2]
    environment = every("ENV")[0]
    (port,) = every("EXPOSE")
    assert f"FLASHPOINT_PORT={port}" in environment
    assert "FLASHPOINT_HOST=0.0.0.0" in environment
    assert json.loads(every("CMD")[0]) == ["flashpoint", "serve"]
    assert "flashpoint" in PROJECT["scripts"]
