"""Dispatch chooses among the backends of a device, and groups problems into launches."""

import os
import subprocess
import sys

import pytest
import torch

from flashpoint_contract.options import BackendRenamedError
from flashpoint_kernels import Options, Problem, ProblemError, available_backends, run
from flashpoint_kernels.dispatching import dispatch
from flashpoint_kernels.dispatching.support import Backends, choose_backend
from tests.conftest import DEVICE
from tests.support.kernels.solving import backward, forward, poisoned, qkv, spec_of


@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["0", ""])
def test_triton_is_no_choice_without_the_interpreter(interpret: str) -> None:
    code = "from flashpoint_kernels import available_backends; print(*available_backends('cpu'))"
    env = os.environ | {"TRITON_INTERPRET": interpret}
    process = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert process.stdout.split() == ["cpu", "tiled", "reference"]


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/conftest.py sets TRITON_INTERPRET=1 for the CPU alone")
def test_under_the_interpreter_triton_is_the_last_choice() -> None:
    assert available_backends("cpu") == ("cpu", "tiled", "reference", "triton")


def test_a_gpu_prefers_our_kernels() -> None:
    assert available_backends("cuda:0") == ("triton", "torch", "tiled", "reference")


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str | None = "3.7.1") -> Backends:
    """Return the backends that an absent GPU with this compute capability and Triton version would have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(dispatch, "version_of", lambda _package: triton)
    dispatch.available_backends.cache_clear()
    monkeypatch.setattr(dispatch, "available_backends", dispatch.available_backends.__wrapped__)
    return dispatch.available_backends("cuda:0")


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        ((7, 0), "3.7.1", "the kernels are for sm_80, .*, and this GPU is an sm_70"),
        ((7, 5), "3.7.1", "this GPU is an sm_75"),
        ((11, 0), "3.7.1", "this GPU is an sm_110"),
        ((10, 0), "3.6.0", "triton 3.6.0 leaves out proxy fences on sm_100, .*; install triton 3.7.1 or later"),
        ((10, 3), "3.7.0", "triton 3.7.0 leaves out proxy fences on sm_103"),
        ((10, 3), "3.9.0", "two parts of a head dimension wrongly on sm_103"),
        ((9, 0), None, "triton is not installed"),
    ],
)
def test_on_a_gpu_where_the_kernels_are_not_right_auto_falls_back_and_triton_is_refused_with_the_reason(
    capability: tuple[int, int], triton: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = on(monkeypatch, capability, triton)
    assert backends == ("torch", "tiled", "reference")
    t = {n: x for n, x in qkv(1, 1, 2, 2, 8).items() if n != "do"}
    assert choose_backend(spec_of(t, Options(), "forward"), backends) == "torch"
    # torch's operators do not support softcap.
    assert choose_backend(spec_of(t, Options(softcap=1.0), "forward"), backends) == "tiled"
    named = spec_of(t, Options(backend="triton"), "forward")
    with pytest.raises(ProblemError, match=f"backend: triton is not available on this device: .*{reason}.*use torch"):
        choose_backend(named, backends)


@pytest.mark.parametrize(
    ("capability", "triton"),
    [((8, 0), "3.6.0"), ((8, 7), "3.6.0"), ((9, 0), "3.6.0"), ((10, 0), "3.7.1"), ((12, 1), "3.9.0")],
)
def test_where_the_kernels_are_right_they_are_preferred(
    capability: tuple[int, int], triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on(monkeypatch, capability, triton) == ("triton", "torch", "tiled", "reference")


def test_run_refuses_a_backend_that_the_device_has_not() -> None:
    q = torch.empty(1, 1, 4, 16, device="meta")
    problem = Problem.create({"q": q, "k": q, "v": q}, Options())
    with pytest.raises(ProblemError, match="backend: triton is not available on this device"):
        run([problem], "triton")


def test_run_refuses_torch_on_a_cpu_by_the_new_name() -> None:
    for options in (Options(), Options(backend="torch")):
        problem = Problem.create({name: torch.ones(1, 1, 4, 8, dtype=torch.float32) for name in "qkv"}, options)
        with pytest.raises(BackendRenamedError, match="use cpu or auto"):
            run([problem], "torch")


def test_problems_of_one_launch_share_its_key() -> None:
    one, other = (
        Problem.create({n: x for n, x in qkv(1, 1, 2, 2, dim).items() if n != "do"}, Options()) for dim in (8, 16)
    )
    with pytest.raises(ValueError, match="launch key"):
        run([one, other], "tiled")
    run([], "tiled")


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_a_group_is_its_problems_one_by_one(backend: str) -> None:
    """Problems of different sizes in one `run`, one of them with o and lse, have the same answers as each alone."""
    shapes = [(1, 2, 5, 9), (3, 4, 12, 3), (2, 2, 1, 1)]
    requests = [qkv(*shape, 16, kv_heads=2, seed=n) for n, shape in enumerate(shapes)]
    requests[1] |= forward(backend, requests[1], scale=0.5)
    group = [poisoned(t, Options(scale=0.5), "backward") for t in requests]
    run(group, backend)
    for t, problem in zip(requests, group, strict=True):
        for name, x in backward(backend, t, scale=0.5).items():
            assert torch.equal(problem.outputs[name], x), name
        assert problem.tensors.keys() == t.keys()  # the forward adds no tensor to the problem


def test_autocast_of_the_caller_does_not_reach_the_products() -> None:
    t = qkv(1, 2, 60, 70, 16)
    expected = forward("tiled", t)["o"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(forward("tiled", t)["o"], expected)


@pytest.mark.slow
def test_torch_and_tiled_do_not_import_triton() -> None:
    """The backends `cpu` and `tiled` do not import Triton: two threads could see a partly imported module."""
    code = (
        "import sys, torch; from flashpoint_kernels import attention; q = torch.ones(1, 2, 70, 16)\n"
        "for backend in ('cpu', 'tiled'): attention(q, q, q, window=(3, 0), causal=True, backend=backend)\n"
        "print('triton' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
