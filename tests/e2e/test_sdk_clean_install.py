"""`pip install .` without extras, in a new venv, gives a client that works without torch, with a real server."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # pip installs into a new venv
ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio, importlib.util, sys
import ml_dtypes, numpy as np
import flashpoint

for package in ("torch", "triton", "jax", "fastapi", "uvicorn", "safetensors"):
    assert importlib.util.find_spec(package) is None, package
assert sys.prefix in flashpoint.__file__, flashpoint.__file__

rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 1, 2, 9, 16))

def dense(q, k, v, do):
    s = q @ k.swapaxes(-1, -2) / 4
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    return p @ v, p.swapaxes(-1, -2) @ do

def check(found, expected, bound):
    assert abs(found.astype(float) - expected).max() <= bound * abs(expected).max()

with flashpoint.Client(URL) as client:
    for dtype, bound in ((np.float32, 2e-6), (ml_dtypes.bfloat16, 2**-6)):
        inputs = [a.astype(dtype) for a in (q, k, v, do)]
        o, dv = dense(*(a.astype(float) for a in inputs))
        answer = client.attention(*inputs[:3])
        assert answer.dtype == dtype
        check(answer, o, bound)
        check(client.attention_grad(inputs[3], *inputs[:3])[2], dv, bound)

async def twin():
    async with flashpoint.AsyncClient(URL) as client:
        return await client.attention(*(a.astype(np.float32) for a in (q, k, v)))

check(asyncio.run(twin()), dense(q, k, v, do)[0], 2e-6)
print("works")
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """Return the `bin` folder of a new venv with this project and its required dependencies."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-compile"]
    done = subprocess.run([*pip, "-c", ROOT / "constraints.txt", ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return home / "bin"


def test_the_client_works(venv, tmp_path, server):
    command = [venv / "python", "-I", "-W", "error", "-c", f"URL = {server.url!r}\n{SCRIPT}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("works\n", "")


@pytest.mark.parametrize(("command", "extra"), [("serve", "server"), ("benchmark", "cli")])
def test_the_command_line_says_what_to_install(venv, tmp_path, command, extra):
    done = subprocess.run([venv / "flashpoint", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"flashpoint {command}: needs ")
    assert f"pip install '.[{extra}]' in a checkout" in done.stderr
