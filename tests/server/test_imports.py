"""HTTP code never needs torch: what an application imports, in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["flashpoint_server.app", "flashpoint_server.cli", "flashpoint_server.serving"])
def test_the_http_side_does_not_import_torch(module):
    program = f"import sys, {module}; print([m for m in ('torch', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
