"""Dispatch chooses a backend by the features of a problem, and never replaces a backend that the caller names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, ProblemError, attention, available_backends, native, run
from flashpoint_kernels.dispatching import dispatch, support
from flashpoint_kernels.dispatching.support import choose_backend
from tests.support.kernels.solving import normal, poisoned, qkv, spec_of


def test_other_kinds_of_devices_run_tiles_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of({n: x for n, x in qkv(1, 1, 2, 2, 8).items() if n != "do"}, Options(), "forward")
    assert choose_backend(spec, available_backends("mps")) == "tiled"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    backends = dispatch.available_backends.__wrapped__("cuda:0")
    assert choose_backend(spec, backends) == "tiled"
    with pytest.raises(ProblemError, match="on this device: the kernels are for NVIDIA's GPUs; use tiled or reference"):
        choose_backend(replace(spec, options=Options(backend="triton")), backends)


def test_a_backend_asked_for_is_never_substituted() -> None:
    spec = spec_of({n: x for n, x in qkv(1, 1, 2, 2, 8).items() if n != "do"}, Options(backend="triton"), "forward")
    with pytest.raises(ProblemError, match="backend: triton is not available"):
        choose_backend(spec, ("cpu", "tiled", "reference"))


def test_unsupported_options_are_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    problem = poisoned(qkv(1, 2, 5, 5, 8), Options(softcap=2.0), "backward")
    with pytest.raises(ProblemError, match="backend: the kernels in C are not there"):
        run([problem], "cpu")
    assert problem.outputs["dq"].isnan().all()


def test_which_problems_the_kernels_in_c_have() -> None:
    def chosen(t: dict[str, Tensor], device: tuple[str, ...] = ("cpu", "tiled", "reference"), **options: Any) -> str:
        return choose_backend(Problem.create(t, Options(**options)).spec, device)

    t = {n: x for n, x in qkv(1, 2, 3, 5, 32).items() if n != "do"}
    assert chosen(t, softcap=2.0) == "cpu"
    assert chosen(t | {"v": normal(1, 2, 5, 48)}) == "cpu"
    assert chosen(t, softcap=2.0, dropout_p=0.1, dropout_seed=1) == "cpu"
    assert chosen(t | {"attn_mask": normal(3, 5)}, softcap=2.0) == "cpu"
    assert chosen(t | {"v": normal(1, 2, 5, 24)}) == "cpu"
    assert chosen({n: x.double() for n, x in t.items()}) == "reference"
    assert chosen(t | {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}) == "cpu"
    with pytest.raises(ProblemError, match="softcap"):
        chosen(t, ("triton", "torch", "tiled"), softcap=2.0, backend="torch")


def _without(monkeypatch: pytest.MonkeyPatch, lists: dict[str, frozenset[str]]) -> None:
    monkeypatch.setitem(lists, "tiled", lists["tiled"] - {"softcap"})


def test_an_option_that_the_module_for_block_masks_does_not_list_is_not_ignored_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, support.IN_BLOCKS)
    q = torch.randn(1, 1, 32, 16, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cpu")
    keywords: dict[str, Any] = {"block_mask": mask, "block_size": (16, 16), "softcap": 0.5}
    with pytest.raises(ProblemError, match="softcap: the tiled backend does not support softcap with block_mask"):
        attention(q, q, q, backend="tiled", **keywords)
    assert torch.isfinite(attention(q, q, q, backend="tiled", softcap=0.5)).all()
    assert torch.isfinite(attention(q, q, q, backend="tiled", **keywords | {"softcap": 0.0})).all()


def test_an_option_that_the_module_for_derivatives_does_not_list_is_not_ignored_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float32, device="cpu", generator=random) for _ in range(3))

    def twice(backend: str) -> Tensor:
        leaf = q.clone().requires_grad_()
        o = attention(leaf, k, v, softcap=0.5, backend=backend)
        (dq,) = torch.autograd.grad(o.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), leaf)[0]

    expected = twice("reference")
    _without(monkeypatch, support.IN_DERIVATIVES)
    with pytest.raises(ProblemError, match="does not support softcap in forward-mode or second derivatives"):
        twice("tiled")
    torch.testing.assert_close(twice("auto"), expected)
