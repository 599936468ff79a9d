"""`make gpu-serve` needs only a folder of wheels on a machine that has torch but no network."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_serve
from benchmarks.gpu_day.checkout import ROOT, pretend_installed, python_path
from tests.support import bare
from tests.support.servers import ServerProcess

METADATA = "Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_serve.py"])
    assert gpu_serve.main() == 3
    assert "nothing was timed" in capsys.readouterr().err


def test_wheels_are_what_the_service_needs_beside_what_every_such_machine_has() -> None:
    there, wanted = (gpu_serve.needed(names, "3.12") for names in (gpu_serve.THERE, gpu_serve.WANTED))
    assert {"torch", "triton", "numpy", "matplotlib", "packaging"} <= there
    assert {"fastapi", "starlette", "uvicorn", "pydantic-core", "httptools", "flashpoint"} <= wanted - there
    assert not any(name.startswith("nvidia") for name in wanted - there)


def test_a_folder_of_wheels_is_installed_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu_serve.environment(tmp_path / "wheels", tmp_path / "installed")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "madeup-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("madeup.py", "here = True\n")
        wheel.writestr("madeup-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("madeup-1.0.dist-info/WHEEL", WHEEL)
        wheel.writestr("madeup-1.0.dist-info/RECORD", "")
    variables = gpu_serve.environment(tmp_path / "wheels", tmp_path / "installed")
    code = "import madeup, flashpoint_server; from importlib.metadata import version; print(version('madeup'))"
    process = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert process.stdout == "1.0\n"


@pytest.mark.slow
def test_the_service_runs_on_a_bare_machine_with_those_wheels(tmp_path: Path) -> None:
    """With only the wheels and a bare machine's packages, the server starts and pytest collects the GPU tests."""
    wanted = tuple(name for name in gpu_serve.needed(gpu_serve.WANTED, "3.12") if name != "flashpoint")
    python = bare.make(tmp_path / "bare", (*gpu_serve.THERE, *wanted))
    path = python_path(pretend_installed(tmp_path / "described", "0"))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *gpu_serve.TESTS]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    server = ServerProcess([str(python), "-m", "flashpoint_server.cli.serve", "--port=0", "--device=cpu"], env)
    try:
        server.wait_ready()
    finally:
        server.end()
