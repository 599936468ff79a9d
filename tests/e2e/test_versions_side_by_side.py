"""The SDK of the last release against this server, and this SDK against the server of the last release.

Every call works, or says in one sentence what to upgrade. The repository's history has the sources of the release.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.servers import DEVICE, serve

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "c746d8253b7f"  # the last commit of version 0.2.0
PACKAGES = ("contract", "client", "kernels", "server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu", reason="the servers compute on the CPU"),
]

# Prints the outcome of each call in JSON: "right", or the text of its error. Only names that both versions have.
CALLS = '''
import asyncio, json, sys
import numpy as np
import flashpoint

rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 1, 2, 5, 8)).astype(np.float32)
s = q.astype(np.float64) @ k.swapaxes(-1, -2) / 8**0.5
p = np.exp(np.where(np.tri(5, dtype=bool), s, -np.inf))
p /= p.sum(-1, keepdims=True)
o = p @ v
dv = p.swapaxes(-1, -2) @ do


def right(got, expected):
    assert np.allclose(got, expected, atol=1e-5), np.abs(got - expected).max()


def attention(client): right(client.attention(q, k, v, causal=True), o)
def backends(client): right(client.attention(q, k, v, causal=True, backend="tiled"), o)
def meta(client):
    got, meta = client.attention(q, k, v, causal=True, with_meta=True)
    right(got, o)
    assert meta.backend
def dropout(client):
    (_, meta) = client.attention(q, k, v, dropout_p=0.5, with_meta=True)
    assert meta.seed is not None
def gradient(client): right(client.attention_grad(do, q, k, v, causal=True)[2], dv)
def masks(client): right(client.attention(q, k, v, attn_mask=np.tri(5, dtype=bool)), o)
def ragged(client):
    cu = np.array([0, 5])
    flat = [t[0].swapaxes(0, 1) for t in (q, k, v)]
    got = client.attention(*flat, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    right(got.swapaxes(0, 1), o[0])
def saved(client):
    forward = client.attention(q, k, v, causal=True, save=True)
    right(forward.o, o)
    right(client.attention_grad(do, saved=forward)[2], dv)
    client.delete_saved(forward)
def cache(client):
    with client.cache(layers=1, kv_heads=2, head_dim=8) as held:
        held.attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], layer=0, causal=True)
        right(held.attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], layer=0, causal=True), o[:, :, 3:])
        client.delete_caches(client.fork_caches([held]))
def verify(client): assert client.verify(q, k, v, causal=True).ok
def benchmark(client):
    shapes = [{"q_len": 16, "head_dim": 8}]
    assert client.benchmark(shapes=shapes, backends=["tiled"], max_seconds=0.01).wait().state == "done"
def state(client):
    assert client.live() and client.ready()
    assert client.info()["backends"]
def asynchronous(client):
    async def ask():
        async with flashpoint.AsyncClient(client.url) as own:
            return await own.attention(q, k, v, causal=True)
    right(asyncio.run(ask()), o)


found = {}
with flashpoint.Client(sys.argv[1]) as client:
    for call in (attention, backends, meta, dropout, gradient, masks, ragged, saved, cache, verify, benchmark, state,
                 asynchronous, *map(eval, sys.argv[2:])):
        try:
            call(client)
        except flashpoint.FlashpointError as error:
            found[call.__name__] = str(error)
        else:
            found[call.__name__] = "right"
print(json.dumps(found))
'''  # fmt: skip
WORK = (
    "attention", "backends", "meta", "dropout", "gradient", "masks", "ragged", "saved", "cache", "verify", "benchmark",
    "state", "asynchronous",
)  # fmt: skip


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Return the folder with the sources of the last release."""
    folder = tmp_path_factory.mktemp("release")
    known = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{RELEASE}^{{commit}}"], capture_output=True)
    if known.returncode:
        pytest.skip("this clone has no history: git fetch --unshallow")
    packed = subprocess.run(["git", "-C", ROOT, "archive", RELEASE, *PACKAGES], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def path_of(folder):
    """Return PYTHONPATH for the packages below `folder`."""
    return os.pathsep.join(str(folder / package) for package in PACKAGES)


def outcomes(folder, url, *more):
    """Run CALLS with the SDK in `folder` against a server."""
    environment = {**os.environ, "PYTHONPATH": path_of(folder)}
    command = [sys.executable, "-c", CALLS, url, *more]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_last_releases_sdk_calls_this_server(server, release):
    assert outcomes(release, server.url) == dict.fromkeys(WORK, "right")


@pytest.fixture(scope="module")
def earlier(release):
    """Yield a server of the last release. Its kernels in C are not built, so that it computes in tiles."""
    server = serve(environment={"PYTHONPATH": path_of(release)})
    yield server
    server.stop()


def test_this_sdk_calls_the_last_releases_server(earlier):
    found = outcomes(ROOT, earlier.url, 'lambda client: client.attention(q, k, v, backend="cpu")')
    renamed = found.pop("<lambda>")
    assert "this server is of an earlier version, which calls the backend cpu torch: upgrade it, or use auto" in renamed
    assert found == dict.fromkeys(WORK, "right")
