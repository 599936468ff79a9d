"""Test and time the service on a real GPU: `make gpu-serve`, or without a network `make gpu-serve WHEELS=DIR`.

First it runs the tests that need a GPU: grouped launches, launches that overlap, cancelled and late requests, memory
that runs out, an engine that dies, hangs or loses its device. Then it runs benchmarks/serving.py on the GPU, which
writes OUT/serving-<device>.json. The argument `tests` or `timings` selects one of these two parts.

Needs the `server` extra, and psutil, pytest and safetensors. A machine without a network installs them from a folder of
wheels, --wheels, and imports the packages of the checkout directly. `--download DIR` fills such a folder on a machine
with a network, in an environment that has all these packages installed (`make gpu-wheels`).

Exit codes: 0, all tests pass and every target is met; 1, a test failed or a target is missed; 3, there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day import checkout  # noqa: E402

NO_GPU = 3
NAMES = ("saved_batches", "caches_in_pages", "gpu_served")
TESTS = ("tests/server/engine/execution/test_executor.py", *(f"tests/e2e/test_{name}.py" for name in NAMES))
PARTS = ("tests", "timings")
WANTED = ("flashpoint[server,otel]", "httptools", "psutil", "safetensors")
# A machine with a GPU already has these packages and their dependencies. torch is larger than all others together.
THERE = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "matplotlib")
# These may be there in versions that are too old: pydantic needs typing_extensions 4.16 or later.
CARRIED = {"typing-extensions"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="tests, timings; both by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--wheels", type=Path, help="install only from this folder, into a temporary folder")
    parser.add_argument("--install", type=Path, metavar="DIR", help="install --wheels there, say versions, and end")
    parser.add_argument("--download", type=Path, metavar="DIR", help="fill a folder of wheels, and do nothing else")
    parser.add_argument("--python", default="3.12", help="Python version of the machine that gets the wheels")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    if args.download:
        return download(args.download, args.python)
    if args.install:
        install(args.wheels, args.install)
        for found in sorted(metadata.distributions(path=[str(args.install)]), key=lambda found: found.name):
            print(f"{found.name} {found.version}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was tested and nothing was timed", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory() as folder:
        return run(args.parts or PARTS, args.out, environment(args.wheels, Path(folder)))


def environment(wheels: Path | None, folder: Path) -> dict[str, str]:
    """Return the variables of the child processes; with `wheels`, install the wheels into `folder` first."""
    variables = {**os.environ, "FLASHPOINT_TEST_DEVICE": "cuda"}
    if wheels is None:
        return variables
    install(wheels, folder)
    path = checkout.python_path(checkout.pretend_installed(folder, "0"))
    return variables | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def install(wheels: Path, folder: Path) -> None:
    """Install every wheel of a folder, without its dependencies. Exits if there is no wheel, or if pip fails."""
    paths = sorted(map(str, wheels.glob("*.whl")))
    if not paths:
        sys.exit(f"{wheels} has no wheels: fill it with `make gpu-wheels` on a machine with a network")
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", "--target", str(folder), *paths], check=True)


def run(parts: Iterable[str], out: Path, variables: dict[str, str]) -> int:
    """Run all parts, even after a failure, and return 1 if a part failed."""
    commands = {
        "tests": ["-P", "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider", *TESTS],
        "timings": ["benchmarks/serving.py", "--device", "cuda", "--out", str(out.resolve())],
    }
    # Warnings are not errors here: this machine may have other versions of packages than constraints.txt pins.
    commands["tests"] += ["-o", "filterwarnings=default"]
    codes = [
        subprocess.run([sys.executable, *commands[part]], cwd=ROOT, env=variables, check=False).returncode
        for part in parts
    ]
    return int(any(codes))


def download(folder: Path, python: str) -> int:
    """Download the wheels that the service needs besides THERE, in the versions that are installed here."""
    names = sorted(needed(WANTED, python) - (needed(THERE, python) - CARRIED))
    pins = [f"{name}=={metadata.version(name)}" for name in names if name != "flashpoint"]
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    code = subprocess.run([*pip, *only, *platforms, "-d", str(folder), *pins], check=False).returncode
    size = sum(path.stat().st_size for path in folder.glob("*.whl")) if folder.exists() else 0
    print(f"{folder}: {len(pins)} packages, {size / 2**20:.1f} MiB")
    return code


def needed(requirements: Iterable[str], python: str) -> set[str]:
    """Return the names of `requirements` and of all their dependencies on Linux with this version of Python.

    The dependencies come from the metadata of packages that are installed here. Other packages are left out.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    names: set[str] = set()
    visited: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({**machine, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for of_extra in ("", *requirement.extras):
            if (name, of_extra) in visited:
                continue
            visited.add((name, of_extra))
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            names.add(name)
            todo += [(Requirement(line), of_extra) for line in lines]
    return names


if __name__ == "__main__":
    sys.exit(main())
