"""The shared-memory utilities of NVIDIA's unmodified tritonclient work with the server."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "clients" / "triton_shared_memory.py"


def test_tritonclients_own_utilities(rpc_server):
    command = [sys.executable, PROGRAM, rpc_server.url.removeprefix("http://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["extension"]
    assert report["error"] <= 2e-6
    assert report["gradient_error"] <= 4e-6
    assert [region["name"] for region in report["registered"]] == ["inputs", "outputs"]
    assert {region["byte_size"] for region in report["registered"]} == {report["input_size"], report["output_size"]}
    assert report["unregistered"] == []
    assert "outputs" in report["refused"]
