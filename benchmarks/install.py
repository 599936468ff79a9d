"""Measure the time from the wheel to the first answer: `python benchmarks/install.py`.

Builds the wheel and the source distribution as `make dist` does. In one empty environment it installs the wheel with
`[server]`, then times `flashpoint serve` until its first answer. In another it installs the wheel alone, the SDK, then
times a program that calls that server. Records seconds, and megabytes on disk. The number of downloaded packages comes
from pip's output; pip takes the other packages from its cache or from a local folder. Takes some minutes and 2 GB
of disk.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from runner import ROOT, Args, run, seconds

ASK = """
import numpy as np, flashpoint
x = np.ones((2, 4), np.float32)
with flashpoint.Client() as client:
    assert np.array_equal(client.attention(x, x, x), x)
"""
MB = 1e6


def outside(**variables: str) -> dict[str, str]:
    """Return the environment's variables without PYTHONPATH, which points to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def built(folder: Path) -> tuple[Path, Path]:
    """Build and return the wheel and the source distribution."""
    build = [sys.executable, "-P", "-m", "hatchling", "build", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def megabytes(folder: Path) -> float:
    return round(sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / MB, 1)


def installed(home: Path, requirement: str) -> tuple[Path, dict[str, Any]]:
    """Install into a new environment; return its Python, and a row with seconds, megabytes, wheels and packages."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-m", "venv", home], check=True)
    empty, python = megabytes(home), home / "bin" / "python"
    environment_ready = time.perf_counter()
    pip = [
        python,
        "-P",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
        requirement,
    ]
    ran = subprocess.run(pip, check=True, capture_output=True, text=True, env=outside())
    return python, {
        "environment_s": round(environment_ready - began, 2),
        "install_s": round(time.perf_counter() - environment_ready, 2),
        "installed_mb": round(megabytes(home) - empty, 1),
        "packages": len(re.findall(r"\S+-\d", ran.stdout.rpartition("Successfully installed")[2])),
        "downloaded": len(re.findall(r"^ *Downloading \S+\.whl \(", ran.stdout, re.MULTILINE)),
    }


def seconds_of_call(python: Path, url: str, folder: Path) -> float:
    """Return the seconds of a process that imports the SDK, makes one call and exits."""
    ask = partial(subprocess.run, [python, "-P", "-c", ASK], check=True, env=outside(FLASHPOINT_URL=url), cwd=folder)
    return round(seconds(ask), 2)


def measure(_: Args) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="flashpoint-install-") as name:
        folder = Path(name)
        wheel, sdist = built(folder / "dist")
        python, server = installed(folder / "server", f"{wheel}[server]")
        command = [python.with_name("flashpoint"), "serve", "--port=0", "--device=cpu", "--log-format=json"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, env=outside(), text=True, cwd=folder)
        try:
            url = next(line["url"] for line in map(json.loads, process.stderr) if line["event"] == "listening")
            server["listening_s"] = round(time.perf_counter() - began, 2)
            server["call_s"] = seconds_of_call(python, url, folder)  # waits until the engine is ready
            server["answer_s"] = round(time.perf_counter() - began, 2)
            sdk_python, sdk = installed(folder / "sdk", str(wheel))
            sdk["answer_s"] = sdk["call_s"] = seconds_of_call(sdk_python, url, folder)
        finally:
            process.terminate()
            process.communicate()
        for each in (server, sdk):
            each["total_s"] = round(each["environment_s"] + each["install_s"] + each["answer_s"], 2)
        sizes = {"wheel_mb": round(wheel.stat().st_size / MB, 2), "sdist_mb": round(sdist.stat().st_size / MB, 2)}
    return {**sizes, "server": server, "sdk": sdk}


if __name__ == "__main__":
    run(measure, "install", packages=("pip", "torch", "triton", "flashpoint"), malloc=False)
