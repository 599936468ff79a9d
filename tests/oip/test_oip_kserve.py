"""KServe's unmodified clients work (`make test-kserve`), in a separate environment with the versions that they pin."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.oip.cases import CASES, REFUSED, ask, judge
from tests.support.oip.grpc_calls import port_of

CLIENTS = Path(__file__).parent / "clients"
KSERVE = "kserve==0.21.0"
# The cases for KServe's gRPC client with its defaults: it sends tensors as bytes, and lacks BF16.
BYTES = [c for c in CASES if c["binary"] and all(i["datatype"] != "BF16" for i in c["inputs"].values())]
STATUSES = {"422": "INVALID_ARGUMENT", "404": "NOT_FOUND", "504": "DEADLINE_EXCEEDED"}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the path of the Python of a new virtual environment with KServe's client."""
    home = tmp_path_factory.mktemp("kserve") / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", KSERVE]
    installed = subprocess.run(install, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.mark.full
def test_kserves_client(url, python, tmp_path):
    report, answers = ask([python, CLIENTS / "kserve_client.py"], tmp_path, url, CASES)
    judge(report, answers, CASES)
    assert report["ready"] == [True, True, True]


@pytest.mark.full
def test_kserves_client_over_grpc_with_its_defaults(rpc_server, python, tmp_path):
    program = [python, CLIENTS / "kserve_grpc_client.py"]
    report, answers = ask(program, tmp_path, f"127.0.0.1:{port_of(rpc_server)}", BYTES)
    judge(report, answers, BYTES, {name: (STATUSES[status], word) for name, (status, word) in REFUSED.items()})
    assert report["ready"] == [True, True, True]
