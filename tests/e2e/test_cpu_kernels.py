"""A server with the C kernels names them in its answers, and computes a query row with the same bits in every call.

A server without these kernels says what to install.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import flashpoint_kernels
from flashpoint import Client
from flashpoint_kernels import native
from flashpoint_kernels.native import switches
from flashpoint_server.engine.benchmarks.local import no_gpu
from tests.support import oracle
from tests.support.messages import JSON, ask, message, normal, post, problem, read_metrics
from tests.support.servers import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the kernels are the CPU's")
SMALL = json.dumps({"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}).encode()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensors(dtype, length=3):
    return {name: normal(1, 2, length, 8, seed=n).to(dtype) for n, name in enumerate(("q", "k", "v", "do"))}


def test_every_answer_names_the_kernel_that_ran(server):
    assert server.get("/info")[1]["kernels"] == native.names()
    for dtype in DTYPES:
        name, t = native.names()[str(dtype).removeprefix("torch.")], tensors(dtype)
        for path, sent in (("/attention", {n: t[n] for n in "qkv"}), ("/attention/grad", t)):
            answer = post(server, path, message(sent))
            assert answer.headers["x-kernel"] == answer.metadata["kernel"] == name
            assert answer.headers["x-backend"] == "cpu"
    answer = post(server, "/attention", SMALL, JSON)
    assert answer.json["kernel"] == answer.headers["x-kernel"] == native.names()["float32"]
    with Client(server.url) as client:
        _, meta = client.attention(*(tensors(torch.bfloat16)[n] for n in "qkv"), with_meta=True)
    assert meta.kernel == native.names()["bfloat16"]


def test_an_answer_of_another_backend_names_no_kernel(server):
    sent = {name: t for name, t in tensors(torch.float32).items() if name != "do"}
    for backend in ("tiled", "reference"):
        answer = post(server, "/attention", message(sent, backend=backend))
        assert "x-kernel" not in answer.headers
        assert "kernel" not in answer.metadata


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_decode_verification_and_forks_give_a_row_the_same_bits(server, dtype):
    """Over HTTP, each call over a cache gives its rows the bits that they have in one prefill without a cache."""
    length, start = 300, 280
    q = normal(1, 4, length, 64, seed=1).to(dtype)
    k, v = (normal(1, 2, length, 64, seed=seed).to(dtype) for seed in (2, 3))
    options = {"causal": True, "softcap": 20.0, "return_lse": True}
    with Client(server.url) as client:

        def check(actual, first, stop):
            for x, y in zip(actual, whole, strict=True):
                assert torch.equal(x, y[:, :, first:stop]), (first, stop)

        whole = client.attention(q, k, v, **options)
        shape = {"kv_heads": 2, "head_dim": 64, "dtype": str(dtype).removeprefix("torch.")}
        with client.cache(**shape) as cache:
            first = 0
            for stop in (1, 130, start):  # a chunked prefill
                check(cache.attention(*(t[:, :, first:stop] for t in (q, k, v)), **options), first, stop)
                first = stop
            fork = cache.fork()
            for row in range(start, length):  # decoding
                check(cache.attention(*(t[:, :, row : row + 1] for t in (q, k, v)), **options), row, row + 1)
            for row in range(start, length, 5):  # five rows a call, as in speculative decoding
                check(fork.attention(*(t[:, :, row : row + 5] for t in (q, k, v)), **options), row, row + 5)
            fork.delete()


def test_a_kernel_that_is_switched_off_is_replaced_and_every_surface_says_so(start_server):
    """The next lower level replaces it, or the next backend where there is none, as on a processor with AVX2 alone."""
    best = native.names("backward")["bfloat16"].removeprefix("c-")
    lowest = best in ("generic", "avx2")
    names = [f"{best}.backward", *([] if lowest else ["tiled"])]
    off = start_server(kernels_off=",".join(names))
    info = off.get("/info")[1]
    assert info["kernels_off"] == dict.fromkeys(names, switches.SETTING)
    assert info["backends"] == (["tiled", "reference"] if lowest else ["cpu", "reference"])
    assert info["kernels"] == ({} if lowest else native.names())
    lower = info["gradient_kernels"].get("bfloat16")
    levels = switches.LEVELS[: switches.LEVELS.index(best)]
    assert lower in ([None] if lowest else [f"c-{level}" for level in levels])
    assert off.wait_for_line(lambda line: line.get("event") == "ready")["kernels_off"] == info["kernels_off"]
    t = tensors(torch.bfloat16)
    forward = post(off, "/attention", message({n: t[n] for n in "qkv"}))
    assert (forward.headers["x-backend"], forward.headers.get("x-kernel")) == (
        info["backends"][0], info["kernels"].get("bfloat16"),
    )  # fmt: skip
    gradients = post(off, "/attention/grad", message(t))
    assert gradients.headers.get("x-kernel") == gradients.metadata.get("kernel") == lower
    exact = oracle.answer(t, {})
    for name in ("dq", "dk", "dv"):
        oracle.close(gradients.tensors[name], exact[name], bound=0.02)
    backend = "cpu" if lowest else "tiled"
    document = json.dumps(json.loads(SMALL) | {"backend": backend}).encode()
    refused = problem(post(off, "/attention", document, JSON), 422, "invalid_request")
    named = names[-1] if lowest else "tiled"
    assert f"{named} is switched off by the setting FLASHPOINT_KERNELS_OFF" in refused["errors"][0]["msg"]
    gauge = f'flashpoint_kernels_off{{by="setting",engine="engine-cpu",kernel="{best}.backward"}}'
    assert read_metrics(off)[gauge] == 1


@pytest.mark.slow
def test_float32_can_be_forced_for_all_types(start_server):
    floats = start_server(environment={"FLASHPOINT_CPU_FLOAT32": "true"})
    kernels = floats.get("/info")[1]["kernels"]
    assert len(set(kernels.values())) == 1
    assert not {f"c-{level}" for level in switches.BFLOAT16} & {*kernels.values()}
    sent = {name: t for name, t in tensors(torch.bfloat16).items() if name != "do"}
    assert post(floats, "/attention", message(sent)).headers["x-kernel"] == kernels["bfloat16"]


@pytest.mark.slow
def test_a_machine_without_the_kernels_says_what_to_install(start_server, tmp_path):
    """The server uses a copy of the package without the compiled library, as installed without a C compiler."""
    package = Path(flashpoint_kernels.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    without = start_server(environment={"PYTHONPATH": str(tmp_path)})
    info = without.get("/info")[1]
    assert info["backends"] == ["tiled", "reference"]
    assert (info["kernels"], info["missing"]) == ({}, [native.MISSING, *filter(None, [no_gpu()])])
    assert without.wait_for_line(lambda line: line.get("reason") == native.MISSING)["level"] == "warning"
    answer = post(without, "/attention", SMALL, JSON)
    assert (answer.status, answer.headers["x-backend"], "x-kernel" in answer.headers) == (200, "tiled", False)
    document = json.dumps(json.loads(SMALL) | {"backend": "cpu"}).encode()
    refused = problem(post(without, "/attention", document, JSON), 422, "invalid_request")
    assert native.MISSING in refused["errors"][0]["msg"]
    assert ask(without, "/health/ready").status == 200
