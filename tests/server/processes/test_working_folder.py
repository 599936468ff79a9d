"""The processes of a server and of the judge import no module of the working folder in the place of another."""

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import post, small
from tests.support.servers import ServerProcess

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
NAMES = ("queue", "numpy", "torch", "socket", "json", "structlog", "flashpoint_server")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a folder the working folder; its modules have the names of libraries, and note who imports them."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"import os\nos.open({str(tmp_path / 'imported')!r}, os.O_CREAT)\nraise SystemExit(1)\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_server_starts_in_a_folder_with_modules_of_its_libraries_names(folder):
    command = [BIN / "flashpoint", "serve", "--port=0", "--device=all", "--workers=2", "--log-format=json"]
    server = ServerProcess(list(map(str, command)), dict(os.environ))
    try:
        server.wait_ready()
        body = json.dumps({key: [[[[1.0, 2.0]]]] for key in "qkv"}).encode()
        assert post(server, "/attention", small()).status == 200
        assert post(server, "/attention", body, "application/json").status == 200  # JSON's process
        server.stop()
    finally:
        server.end()
    assert not (folder / "imported").exists()


@pytest.mark.slow
def test_the_judge_imports_its_libraries_from_where_they_are_installed(folder):
    program = """
import sys
from flashpoint_kernels.judging.process import _Spawner
spawner = _Spawner()
assert spawner.process.poll() is None
spawner.control.sendall(b"")
spawner.control.close()
sys.exit(spawner.process.wait())
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not (folder / "imported").exists()


def test_each_program_that_starts_python_keeps_the_working_folder_out():
    """`-m` and `-c` put the working folder before all libraries, unless -P comes first."""
    wrong = []
    for folder in ("contract", "kernels", "client", "server", "benchmarks", "loadtests", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
                values = [ast.unparse(part) for part in parts]
                for first, second in itertools.pairwise(values):
                    starts = "python" in first.lower() or first == "sys.executable"
                    if starts and second in ("'-m'", "'-c'"):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"these need -P before -m or -c: {wrong}"
