"""The GPU image is built and started on a machine without a GPU: `make gpu-image-test`.

If the CUDA base image cannot be pulled, a minimal Debian replaces it. pip installs the CUDA build of torch in any case.
RECORD=1 writes the sizes of layers and packages, and the build times, to benchmarks/results/.
"""

import contextlib
import json
import os
import re
import subprocess
from collections import Counter

import numpy as np
import pytest

from benchmarks import record
from flashpoint_kernels.triton_backend.tools.ahead import DTYPES
from tests.docker.engine import ROOT, UnavailableError, engine
from tests.docker.test_dockerfile import every
from tests.docker.test_image import READ_ONLY, Container, Q, expected, wait

pytestmark = pytest.mark.image
IMAGE = "flashpoint:gpu"
BASE = every("FROM")[0].partition(" AS ")[0]
ARCHITECTURES = [int(word) for word in re.search(r'ARCHITECTURES="([\d ]+)"', every("ENV", "base-gpu")[1])[1].split()]
SIZE = 30 << 30  # bytes of disk or memory for the image, its build stage, and the downloads
BUILD_SECONDS = int(os.environ.get("IMAGE_BUILD_SECONDS", "3600"))
# This program prints the size in bytes of each installed package: the sum over the files that its metadata lists.
PACKAGES = """
import importlib.metadata as m, json, os
sizes = {}
for d in m.distributions():
    paths = {os.path.realpath(d.locate_file(f)) for f in d.files or ()}
    sizes[f'{d.name} {d.version}'] = sum(os.path.getsize(p) for p in paths if os.path.isfile(p))
print(json.dumps(sizes))
"""
# This program prints [capability, name] of each compiled kernel in the image, and the bytes of all kernels.
COMPILED = """
import json, pathlib
root = pathlib.Path('/opt/flashpoint/compiled')
found = [json.loads(f.read_text()) for f in root.rglob('*.json') if not f.name.startswith('__grp__')]
size = sum(f.stat().st_size for f in root.rglob('*') if f.is_file())
print(json.dumps([[[f['target']['arch'], f['name']] for f in found if 'target' in f], size]))
"""


@pytest.fixture(scope="module")
def docker():
    """Build the image, print the times and sizes, and yield the Docker engine that has it."""
    with contextlib.ExitStack() as stack:
        try:
            docker_engine = stack.enter_context(engine(SIZE))
            base = docker_engine.provide(BASE, wheels=False)
        except UnavailableError as error:
            pytest.skip(str(error))
        took = docker_engine.build(IMAGE, seconds=BUILD_SECONDS)
        layers = [
            {"size": size, "made_by": by.removeprefix("/bin/sh -c #(nop) ")} for size, by in docker_engine.layers(IMAGE)
        ]
        packages = json.loads(inside(docker_engine, PACKAGES))
        compiled, compiled_bytes = json.loads(inside(docker_engine, COMPILED))
        result = {
            "environment": record.environment(),
            "base": base,
            "build_s": round(took.seconds),
            "steps": took.steps,
            "bytes": docker_engine.size(IMAGE),
            "layers": layers,
            "compiled": {"kernels": Counter(arch for arch, _ in compiled), "bytes": compiled_bytes},
            "packages": dict(sorted(packages.items(), key=lambda one: -one[1])),
        }
        print(json.dumps(result, indent=1))
        if os.environ.get("RECORD"):
            record.write(ROOT / "benchmarks/results", "gpu-image", result)
        yield docker_engine


def inside(docker, code, *flags):
    """Return the output of the Python program `code`, run in a new container of the image."""
    return docker.docker("run", "--rm", "--entrypoint=python", *flags, IMAGE, "-c", code, seconds=300).stdout


@pytest.fixture
def served(docker):
    container = Container(docker, *READ_ONLY, image=IMAGE)
    yield container.ready()
    container.remove()


def test_torch_is_the_cuda_build_of_the_pinned_release(docker):
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    torch, cuda, there = inside(
        docker, "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    ).split()
    assert torch.partition("+")[0] == pinned
    assert (int(cuda.partition(".")[0]), there) == (int(re.search(r"cuda:(\d+)", BASE)[1]), "False")


def test_kernels_are_there_for_every_architecture(docker):
    """Every GPU architecture has the same kernels in the image, each for every dtype, head dimension and variant."""
    compiled, _ = json.loads(inside(docker, COMPILED))
    assert {arch for arch, _ in compiled} == set(ARCHITECTURES)
    names = [{name for one, name in compiled if one == arch} for arch in ARCHITECTURES]
    assert all(each == names[0] for each in names)
    launches = len(DTYPES) * 2 * 3  # head dimensions 64 and 128; plain, window, mask
    for name in ("attention_forward", "attention_backward_kv", "attention_backward_q"):
        assert name in names[0]
        for arch in ARCHITECTURES:
            assert compiled.count([arch, name]) >= launches


def test_a_launch_that_was_compiled_ahead_is_not_compiled_again(docker):
    """Triton finds the image's kernels by its cache keys: compiling one of them again adds no file to the cache."""
    words = "--arch 100 --dtypes bfloat16 --head-dims 128 --levels 1"
    ahead = f"python -m flashpoint_kernels.triton_backend.tools.ahead {words} --processes 1"
    code = "find -L $TRITON_CACHE_DIR/ -name '*.cubin' | wc -l"
    run = docker.docker("run", "--rm", IMAGE, "sh", "-ec", f"{code}; {ahead} >/dev/null; {code}", seconds=300)
    before, after = run.stdout.split()
    assert int(before) == int(after) > 0


def test_the_entry_point_puts_the_compiled_kernels_where_triton_reads(served):
    count = "find $TRITON_CACHE_DIR/ -name '*.cubin' -exec test -s {} \\; -print | wc -l"
    linked = int(served.run("sh", "-c", count))
    assert linked == int(served.run("sh", "-c", "find /opt/flashpoint/compiled -name '*.cubin' | wc -l")) > 0


def test_without_a_gpu_it_serves_on_the_cpu_and_says_what_is_missing(served):
    with served.client() as client:
        np.testing.assert_allclose(client.attention(Q, Q, Q), expected(Q), atol=1e-6)
        info = client.info()
    assert info["device"]["name"] == "cpu"
    (message,) = info["missing"]
    assert re.fullmatch(
        r"torch is built for CUDA [\d.]+ but finds no GPU, so the CPU computes: .*--gpus all.*", message
    )
    logged = [json.loads(line) for line in served.logs().splitlines() if line.startswith("{")]
    assert [(line["level"], line["reason"]) for line in logged if line["event"] == "no GPU"] == [("warning", message)]


def test_a_gpu_that_is_asked_for_and_missing_ends_the_start_with_a_sentence(docker):
    container = Container(docker, "-e", "FLASHPOINT_DEVICE=cuda", image=IMAGE)
    try:
        wait(lambda: container.state(".State.Status") == "exited", container.logs)
        assert container.state(".State.ExitCode") != "0"
        assert "device cuda is not available: torch finds no CUDA device; set --device cpu" in container.logs()
        assert "Traceback" not in container.logs()
    finally:
        container.remove()


def test_a_gpu_that_the_engine_lacks_is_refused_by_the_engine(docker):
    """`docker run --gpus all` fails on a machine without NVIDIA's container toolkit."""
    run = subprocess.run(
        [docker.client, "run", "--rm", "--gpus", "all", IMAGE], env=docker.environment, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "could not select device driver" in run.stderr
