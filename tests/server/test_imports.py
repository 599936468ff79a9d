"""The HTTP process never imports torch or the client package, and imports gRPC only if gRPC is used."""

import importlib.util
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
def say():
    print([name for name in ("torch", "triton", "grpc") if name in sys.modules])
import flashpoint_server.app, flashpoint_server.cli.serve, flashpoint_server.cli.serving
say()
"""


GRPC = """
import flashpoint_server.oip.grpc.server
say()
"""


def test_the_http_side_does_not_import_torch():
    has_grpc = importlib.util.find_spec("grpc") is not None
    command = [sys.executable, "-c", PROGRAM + (GRPC if has_grpc else "")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["[]", *(["['grpc']"] if has_grpc else [])]


def test_a_server_imports_no_client():
    program = "import sys, flashpoint_server.cli.serving; print([name in sys.modules for name in NAMES])"
    program = (
        f"NAMES = ('flashpoint_contract.schemas.options', 'flashpoint._client.client', 'httpx', 'torch')\n{program}"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[True, False, False, False]\n"


def test_http_processes_do_not_load_torch(server):
    assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()
