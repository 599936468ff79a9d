"""Common parts of recorded results: the environment (machine, versions, commit, date), percentiles, and the file name.

The benchmarks, the load tests, the fuzzer and the fault-injection tests use this module.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LINE = 800  # most characters of a part of a result in one line; a row of compile.py has about 500


def environment(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """Return the device, the machine's load, the versions of `packages`, the commit and the date.

    For a CPU, the device has the family and the model, because hosts call processors of several generations AMD EPYC,
    and `kernels` names the kernels in C that compute bfloat16, such as c-avx2.
    """
    # Imported here, because a process of calls.py imports the packages of another commit.
    from flashpoint_kernels.dispatching.machine import cpu_name, version_of

    if device == "cpu":
        from flashpoint_kernels import native

        machine = {"device": cpu_name() + _generation(), "kernels": native.names().get("bfloat16")}
    else:
        from flashpoint_kernels.timing.device import device_name  # this imports torch

        machine = {"device": device_name(device)}
    return {
        **machine,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
        "commit": commit(),
        "date": now(),
    }


def _generation() -> str:
    """Return the family and the model of an x86 processor, as in " (family 25, model 17)", or ""."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = [re.search(rf"^{name}\s*: (\d+)$", text, re.M) for name in ("cpu family", "model")]
    return " (family {}, model {})".format(*(each[1] for each in found if each)) if all(found) else ""


def commit(tree: Path = ROOT) -> str:
    """Return the commit that is checked out, or "unknown"."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def percentile(samples: Sequence[float], part: float) -> float:
    """Return the `part`-th percentile of the samples, interpolated; infinity without samples."""
    return float(np.percentile(samples, part)) if len(samples) else math.inf


def machine_name(made: Mapping[str, Any]) -> str:
    """Return the device of an `environment` for file names."""
    return re.sub(r"[^a-z0-9]+", "-", made["device"].lower()).strip("-")


def write_compiled(path: Path, **fields: Any) -> None:
    """Write a result of compiling without a device, with versions, commit and date, and print the path."""
    from flashpoint_kernels.dispatching.machine import version_of

    made = {"device": "none: compiled ahead of time", "triton": version_of("triton")}
    made |= {"python": platform.python_version(), "commit": commit(), "date": now()}
    path.write_text(text(made | fields))
    print(f"written: {path}", flush=True)


def write(folder: Path, what: str, result: Mapping[str, Any]) -> None:
    """Write `result` to WHAT-MACHINE.json, and print the path. MACHINE comes from the result's environment."""
    path = folder / f"{what}-{machine_name(result['environment'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(result))
    print(f"written: {path}")


def text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON in which each part of up to `LINE` characters, such as a row, is one line."""
    return _lines(result, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, Mapping | list | tuple) or not value or (depth and len(line) <= LINE):
        return line
    pad = " " * (depth + 1)
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {_lines(each, depth + 1)}" for name, each in value.items()]
        start, end = "{}"
    else:
        parts, (start, end) = [_lines(each, depth + 1) for each in value], "[]"
    return f"{start}\n{pad}" + f",\n{pad}".join(parts) + f"\n{' ' * depth}{end}"
