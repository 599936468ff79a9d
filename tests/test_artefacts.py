"""The artefacts of `make dist`: the wheel, installed into its own environment, serves and answers.

The environment sees the packages of this one, but for Flashpoint, which comes from the wheel.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flashpoint
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="make test installs it")

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2 << 20  # bytes of a file: more would be data that nobody meant to ship


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of an environment that has the wheel."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", built[0]], check=True, env=clean())
    (packages,) = home.glob("lib/python*/site-packages")
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    return python


def clean(**variables):
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def said(python, *arguments, cwd, check=True, **variables):
    done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=cwd, env=clean(**variables))
    assert not check or done.returncode == 0, done.stderr
    return done


def test_both_files_have_what_is_needed_and_nothing_else(built):
    wheel, sdist = built
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"flashpoint", "flashpoint_contract", "flashpoint_kernels", "flashpoint_server"}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == packages
    assert all(f"{package}/py.typed" in names for package in packages)
    for needed in ("page/templates/errors.html", "page/static/page.js", "oip/grpc/descriptors.binpb"):
        assert f"flashpoint_server/{needed}" in names
    assert "flashpoint_kernels/native/libflashpoint.so" in names
    assert wheel.name.split("-", 2)[2] == f"py3-none-{sysconfig.get_platform().replace('-', '_')}.whl"
    with tarfile.open(sdist) as archive:
        sources = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"client", "contract", "kernels", "server", "pyproject.toml", "README.md", "LICENSE"} <= sources
    assert "hatch_build.py" in sources
    assert not sources & {"tests", "benchmarks", ".git"}
    assert all(file.stat().st_size < LIMIT for file in built)


def test_the_lock_file_has_every_package_of_a_server_but_torch_in_its_tested_version_with_hashes():
    locked = {}
    for entry in (ROOT / "requirements.lock").read_text().replace("\\\n", "").splitlines():
        requirement, *hashes = entry.split("--hash=")
        assert hashes, entry
        assert all(re.fullmatch("sha256:[0-9a-f]{64} *", each) for each in hashes)  # and no address
        parsed = Requirement(requirement)
        locked[canonicalize_name(parsed.name)] = parsed
    tested = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pins = {canonicalize_name(each.name): str(each.specifier) for each in tested}
    here = {name: each for name, each in locked.items() if each.marker is None or each.marker.evaluate()}
    assert {name: str(each.specifier) for name, each in here.items()}.items() <= pins.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("cli", "plot", "server", "grpc", "otel")
    asked = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    needed = {"flashpoint", "torch", "triton"}  # not in the file, and what torch needs comes with it
    while asked:
        each = Requirement(asked.pop())
        name = canonicalize_name(each.name)
        if name not in needed and (each.marker is None or each.marker.evaluate({"extra": ""})):
            needed.add(name)
            asked += importlib.metadata.requires(name) or ()
    assert needed - here.keys() == {"flashpoint", "torch", "triton"}


def test_the_wheel_serves_and_is_asked(installed, tmp_path):
    version = said(installed, "-m", "flashpoint", "--version", cwd=tmp_path).stdout
    assert version.split()[1] in next(iter(Path(installed).parents[1].glob("lib/*/site-packages/flashpoint-*"))).name
    assert said(installed.parent / "flashpoint", "--version", cwd=tmp_path).stdout == version
    where = said(installed, "-c", "import flashpoint_server; print(flashpoint_server.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(installed.parents[1]))
    command = [installed, "-m", "flashpoint", "serve", "--port=0", "--device=cpu"]
    server = ServerProcess(list(map(str, command)), clean())
    try:
        server.wait_ready()
        x = np.ones((2, 4), np.float32)
        with flashpoint.Client(server.url) as client:
            assert np.array_equal(client.attention(x, x, x), x)
            assert client.info()["version"] == version.split()[1]
        server.stop()
    finally:
        server.end()


def test_the_sdk_alone_needs_none_of_the_extras(installed, tmp_path):
    absent = ("torch", "triton", "fastapi", "typer", "rich", "matplotlib", "pytest")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import flashpoint; "
    assert said(installed, "-c", program + "print(flashpoint.Client().url)", cwd=tmp_path).stdout.startswith("http")
    run = program + "from flashpoint.cli import main; sys.exit(main(['info']))"
    refused = said(installed, "-c", run, cwd=tmp_path, check=False)
    assert (refused.returncode, "needs typer, which is not installed" in refused.stderr) == (2, True)


def test_pytest_finds_the_fixture(installed, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(judge_attention):\n    assert callable(judge_attention)\n")
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:cloudcoil"]
    assert "1 passed" in said(installed, "-m", "pytest", *flags, cwd=tmp_path).stdout
