"""Run the tests with other versions of Python and with the oldest libraries: `make test-versions`.

- Python 3.12 and 3.13: the tests of the SDK, the wire formats and the HTTP processes, without torch and triton.
- Python 3.11: these and end-to-end tests of the service, with the lowest library versions that pyproject.toml allows.
  torch and triton keep the versions of constraints.txt; benchmarks/compat.py covers other versions of Triton.

The virtual environments stay in build/versions for the next run. The exit status is 1 if a test fails. A version of
Python that is not installed is reported and skipped.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "versions"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("server", "grpc", "otel")
# The packages that these tests import, from the extra `dev` of pyproject.toml.
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-randomly", "pytest-xdist", "pyyaml", "safetensors")
HTTP_SIDE = ("tests/client", "tests/contract", "tests/server", "tests/fuzz")
SERVED = ("http_exact", "observability", "sdk")
SERVICE = (*HTTP_SIDE, *(f"tests/e2e/test_{name}.py" for name in SERVED))


def main() -> int:
    results = {f"Python {version}": newer(version) for version in ("3.12", "3.13")}
    results["lowest versions"] = lowest()
    for name, result in results.items():
        print(f"{name}: {result}")
    return 1 if "failed" in results.values() else 0


def newer(version: str) -> str:
    """Run HTTP_SIDE on this version of Python, without torch; return "passed", "failed" or why no test ran."""
    python = find_python(version)
    if python is None:
        return f"not tested: install Python {version}"
    pins = (ROOT / "constraints.txt").read_text()
    wanted = [line for line in requirements(EXTRAS) if name_of(line) not in ("torch", "triton")]
    pins = "\n".join(line for line in pins.splitlines() if name_of(line) not in ("torch", "triton"))
    return run_tests(python, version, [*wanted, *TOOLS], pins, HTTP_SIDE)


def lowest() -> str:
    """Run SERVICE with the lowest allowed version of each library that users install; return "passed" or "failed".

    torch, triton and the test tools have the versions of constraints.txt.
    """
    pins = {name_of(line): line for line in (ROOT / "constraints.txt").read_text().splitlines()}
    pinned = [pins[name] for name in ("torch", "triton", *map(name_of, TOOLS))]
    wanted = [line for line in requirements(EXTRAS) if name_of(line) not in ("torch", "triton")]
    floors = [re.sub(r">=([^,]+).*", r"==\1", line) for line in wanted]
    # The lowest versions call functions that the newest versions of their dependencies deprecate.
    more = ("-W", "ignore::DeprecationWarning")
    return run_tests(sys.executable, "lowest", [*floors, "torch", "triton", *TOOLS], "\n".join(pinned), SERVICE, more)


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Return the project's requirements with these extras, and with the extras that these extras include."""
    resolved, todo = list(PROJECT["dependencies"]), list(extras)
    while todo:
        for line in PROJECT["optional-dependencies"][todo.pop()]:
            if own := re.fullmatch(r"flashpoint\[(.*)\]", line):
                todo += own[1].split(",")
            else:
                resolved.append(line)
    return sorted(set(resolved))


def name_of(requirement: str) -> str:
    return re.split(r"[\[=<>;, ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of this version, on the PATH or from pyenv, or None if none runs."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for path in (shutil.which(f"python{version}"), *sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def run_tests(
    python: str, name: str, wanted: list[str], pins: str, tests: tuple[str, ...], more: tuple[str, ...] = ()
) -> str:
    """Install `wanted`, constrained by `pins`, into HOME/name and run `tests`; return "passed" or "failed"."""
    home = HOME / name
    print(f"== {name}: installing into {home.relative_to(ROOT)}", flush=True)
    if not home.exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    constraints = home / "constraints.txt"
    constraints.write_text(pins + "\n")
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", constraints, *wanted], check=True)
    subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
    print(f"== {name}: {', '.join(tests)}", flush=True)
    command = [home / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    ran = subprocess.run([*command, "-m", "not gpu and not full and not slow", *more, *tests], cwd=ROOT, check=False)
    return "passed" if ran.returncode == 0 else "failed"


if __name__ == "__main__":
    sys.exit(main())
