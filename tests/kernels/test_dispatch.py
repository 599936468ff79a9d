"""Which backends there are, and what a group of problems may be."""

import os
import subprocess
import sys

import pytest
import torch

from flashpoint_kernels import Options, Problem, ProblemError, available_backends, native, run
from flashpoint_kernels.support import choose_backend
from tests.conftest import DEVICE
from tests.support.kernels.solving import backward, forward, poisoned, qkv, spec_of


@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["0", ""])
def test_triton_is_no_choice_without_the_interpreter(interpret: str) -> None:
    code = "from flashpoint_kernels import available_backends; print(*available_backends('cpu'))"
    env = os.environ | {"TRITON_INTERPRET": interpret}
    found = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["torch", "tiled", "reference"]


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/conftest.py sets TRITON_INTERPRET=1 for the CPU alone")
def test_under_the_interpreter_triton_is_the_last_choice() -> None:
    assert available_backends("cpu") == ("torch", "tiled", "reference", "triton")


def test_a_gpu_prefers_our_kernels() -> None:
    assert available_backends("cuda:0") == ("triton", "torch", "tiled", "reference")


def test_a_backend_asked_for_is_never_substituted() -> None:
    spec = spec_of({n: x for n, x in qkv(1, 1, 2, 2, 8).items() if n != "do"}, Options(backend="triton"), "forward")
    with pytest.raises(ProblemError, match="backend: triton is not available"):
        choose_backend(spec, ("torch", "tiled", "reference"))


def test_problems_of_one_launch_share_its_key() -> None:
    one, other = (
        Problem.create({n: x for n, x in qkv(1, 1, 2, 2, dim).items() if n != "do"}, Options()) for dim in (8, 16)
    )
    with pytest.raises(ValueError, match="launch key"):
        run([one, other], "tiled")
    run([], "tiled")


@pytest.mark.parametrize("backend", ["torch", "tiled", "reference"])
def test_a_group_is_its_problems_one_by_one(backend: str) -> None:
    """Different lengths, batches, heads and scales together; one of them with o and lse, the others without."""
    shapes = [(1, 2, 5, 9), (3, 4, 12, 3), (2, 2, 1, 1)]
    requests = [qkv(*shape, 16, kv_heads=2, seed=n) for n, shape in enumerate(shapes)]
    requests[1] |= forward(backend, requests[1], scale=0.5)
    group = [poisoned(t, Options(scale=0.5), "backward") for t in requests]
    run(group, backend)
    for t, problem in zip(requests, group, strict=True):
        for name, x in backward(backend, t, scale=0.5).items():
            assert torch.equal(problem.outputs[name], x), name
        assert problem.tensors.keys() == t.keys()  # what the forward made is not left in the problem


def test_autocast_of_the_caller_does_not_reach_the_products() -> None:
    t = qkv(1, 2, 60, 70, 16)
    expected = forward("tiled", t)["o"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(forward("tiled", t)["o"], expected)


def test_unsupported_options_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    problem = poisoned(qkv(1, 2, 5, 5, 8), Options(softcap=2.0), "backward")
    with pytest.raises(ProblemError, match="softcap: the torch backend does not support softcap"):
        run([problem], "torch")
    assert problem.outputs["dq"].isnan().all()


@pytest.mark.slow
def test_torch_and_tiled_do_not_import_triton() -> None:
    """Two threads of an engine that first use two backends would find a part of Triton."""
    code = (
        "import sys, torch; from flashpoint_kernels import attention; q = torch.ones(1, 2, 70, 16)\n"
        "for backend in ('torch', 'tiled'): attention(q, q, q, window=(3, 0), causal=True, backend=backend)\n"
        "print('triton' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
