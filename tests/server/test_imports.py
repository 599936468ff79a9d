"""HTTP code never needs torch, and gRPC only where it is spoken: what is imported, in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["app", "cli", "serving", "grpc.server"])
def test_the_http_side_does_not_import_torch(module):
    program = (
        f"import sys, flashpoint_server.{module}; print([m for m in ('torch', 'triton', 'grpc') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ("['grpc']" if module == "grpc.server" else "[]")
