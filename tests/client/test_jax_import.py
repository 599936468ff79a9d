"""JAX is needed by `flashpoint.jax` alone, and that needs no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "expected"), [("flashpoint, flashpoint.cli", []), ("flashpoint.jax", ["jax"])], ids=["client", "jax"]
)
def test_what_it_imports(module, expected):
    program = f"import sys, {module}; print([m for m in ('jax', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(expected)
