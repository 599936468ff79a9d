"""A server's processes import the schemas of the SDK, and none of its clients."""

import subprocess
import sys

import pytest


def test_a_server_imports_no_client():
    program = "import sys, flashpoint_server.cli.serving; print([name in sys.modules for name in NAMES])"
    program = (
        f"NAMES = ('flashpoint_contract.schemas.options', 'flashpoint._client.client', 'httpx', 'torch')\n{program}"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[True, False, False, False]\n"


@pytest.mark.slow
def test_an_engine_starts_without_sympy():
    """torch imports it, in half a second, when autograd gets gradients of outputs."""
    program = "import sys; from flashpoint_server.engine import self_test; self_test.start('cpu')"
    program += "; print('sympy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
