"""The wheel of `make dist`, installed into a new virtual environment, runs a server that answers requests.

The new environment uses the installed packages of the current one, except Flashpoint, which comes from the wheel.
"""

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from functools import cache
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
LIMIT = 2 << 20  # bytes; a larger wheel or source archive would contain unintended data


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    made = [f"DIST={folder}", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(["make", "-o", ".venv/.dev", "dist", *made], cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def environment(home, wheel):
    """Create a virtual environment that has only the wheel; return the paths of its Python and its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, env=clean())
    (packages,) = home.glob("lib/python*/site-packages")
    return python, packages


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return the path of the Python of an environment with the wheel and the packages of the current environment."""
    python, packages = environment(tmp_path_factory.mktemp("venv"), built[0])
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(theirs) + "\n")
    return python


def needed(wheel, extras, **system):
    """Return the names of the packages that pip installs for these extras of the wheel.

    system: values for environment markers, such as `platform_system`; the default is the current system.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    names, todo = {"flashpoint": set()}, [("flashpoint", extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if extra in names.setdefault(name, set()):
            continue
        names[name].add(extra)
        requirements = metadata.get_all("Requires-Dist") if name == "flashpoint" else importlib.metadata.requires(name)
        for each in map(Requirement, requirements or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra, **system}):
                todo += [(canonicalize_name(each.name), more) for more in ("", *each.extras)]
    return set(names) - {"flashpoint"}


@pytest.fixture(scope="module")
def alone(built, tmp_path_factory):
    """Return a function of extras. It returns the Python of an environment with only the wheel and these extras."""

    @cache
    def made(*extras):
        python, packages = environment(tmp_path_factory.mktemp("-".join(extras)), built[0])
        for name in needed(built[0], extras):
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(distribution.locate_file(top))
        return python

    return made


def clean(**variables):
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def output_of(python, *arguments, cwd, check=True, **variables):
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
    platform = sysconfig.get_platform().replace("-", "_").replace("linux", r"manylinux_2_\d+")
    assert re.fullmatch(rf"py3-none-{platform}\.whl", wheel.name.split("-", 2)[2])
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
        assert all(re.fullmatch("sha256:[0-9a-f]{64} *", each) for each in hashes)  # hashes only, without a URL
        parsed = Requirement(requirement)
        locked[canonicalize_name(parsed.name)] = parsed
    tested = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pins = {canonicalize_name(each.name): str(each.specifier) for each in tested}
    here = {name: each for name, each in locked.items() if each.marker is None or each.marker.evaluate()}
    assert {name: str(each.specifier) for name, each in here.items()}.items() <= pins.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("cli", "plot", "server", "grpc", "otel")
    asked = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    needed = {"flashpoint", "torch", "triton"}  # the lock file omits these, and so torch's dependencies
    while asked:
        each = Requirement(asked.pop())
        name = canonicalize_name(each.name)
        if name not in needed and (each.marker is None or each.marker.evaluate({"extra": ""})):
            needed.add(name)
            asked += importlib.metadata.requires(name) or ()
    assert needed - here.keys() == {"flashpoint", "torch", "triton"}


def test_the_wheel_serves_and_is_asked(installed, tmp_path):
    version = output_of(installed, "-m", "flashpoint", "--version", cwd=tmp_path).stdout
    assert version.split()[1] in next(iter(Path(installed).parents[1].glob("lib/*/site-packages/flashpoint-*"))).name
    assert output_of(installed.parent / "flashpoint", "--version", cwd=tmp_path).stdout == version
    where = output_of(
        installed, "-c", "import flashpoint_server; print(flashpoint_server.__file__)", cwd=tmp_path
    ).stdout
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
    assert output_of(installed, "-c", program + "print(flashpoint.Client().url)", cwd=tmp_path).stdout.startswith(
        "http"
    )
    run = program + "from flashpoint.cli import main; sys.exit(main(['info']))"
    refused = output_of(installed, "-c", run, cwd=tmp_path, check=False)
    assert (refused.returncode, "needs typer, which is not installed" in refused.stderr) == (2, True)


def test_pytest_finds_the_fixture(installed, tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(judge_attention):\n    assert callable(judge_attention)\n")
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:cloudcoil"]
    assert "1 passed" in output_of(installed, "-m", "pytest", *flags, cwd=tmp_path).stdout


SERVER = {"fastapi", "starlette", "uvicorn", "pydantic-settings", "structlog", "msgspec", "prometheus-client", "jinja2"}
LIBRARY = """
import importlib.util, sys
import torch
import flashpoint_kernels
q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
truth = torch.nn.functional.scaled_dot_product_attention(q, k, v)
for backend in ("auto", "cpu", "tiled", "reference"):
    given = [q, k, v] if backend == "reference" else [t.float() for t in (q, k, v)]
    o = flashpoint_kernels.attention(*given, backend=backend)
    assert torch.allclose(o.double(), truth, atol=1e-5), backend
    o.sum().backward()
print(sorted(name for name in sys.argv[1:] if importlib.util.find_spec(name)))
"""


def test_the_library_is_installed_alone(built, alone, tmp_path):
    """`pip install flashpoint[torch]` has attention, gradients and `judge`, and none of the server's dependencies."""
    # jinja2 is also a dependency of torch.
    assert needed(built[0], ["torch"]) & (SERVER | {"typer", "rich", "matplotlib"}) <= {"jinja2"}
    packages = ("fastapi", "uvicorn", "structlog", "typer", "rich", "matplotlib")
    assert output_of(alone("torch"), "-c", LIBRARY, *packages, cwd=tmp_path).stdout == "[]\n"
    without_triton = "import sys; sys.modules['triton'] = None\n" + LIBRARY  # as on systems without triton
    assert output_of(alone("torch"), "-c", without_triton, *packages, cwd=tmp_path).stdout == "[]\n"
    program = (
        "from flashpoint_kernels import attention, judge\n"
        "if __name__ == '__main__':\n"
        "    print(judge(attention, quick=True, dtype='float32').verdict)\n"
    )
    (tmp_path / "judged.py").write_text(program)
    assert output_of(alone("torch"), "judged.py", cwd=tmp_path).stdout == "right\n"


def test_the_library_and_the_command_line_judge(alone, tmp_path):
    """With `flashpoint[torch,cli]`, `flashpoint verify` runs, and `flashpoint serve` names the extra to install."""
    python = alone("torch", "cli")
    judge = ["verify", "--kernel", "flashpoint_kernels:attention", "--quick", "--dtype", "float32"]
    assert "PASS" in output_of(python, "-m", "flashpoint", *judge, cwd=tmp_path).stdout
    refused = output_of(python, "-m", "flashpoint", "serve", cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert re.search(r"needs structlog, which is not installed\n.*pip install .*\[server\]", refused.stderr)


def test_triton_is_wanted_on_linux_alone(built):
    for system, wanted in (("Linux", True), ("Darwin", False), ("Windows", False)):
        assert ("triton" in needed(built[0], ["torch"], platform_system=system)) is wanted
