"""Triton's interpreter does not run Gluon, and the path for Hopper raises an error that says so."""

import sys
from importlib import import_module

import pytest
import torch

from flashpoint_kernels import Options
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED
from tests.support.kernels.hopper import ON_SM_90, kernels

pytestmark = ON_SM_90


@pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter")
@pytest.mark.usefixtures("hopper_path")
def test_without_the_tests_interpreter_of_gluon_the_path_is_not_taken_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {name: torch.ones(1, 1, 70, 16, dtype=torch.float16) for name in "qkv"}
    assert kernels(tensors, Options()) == ["attention_forward_hopper"]
    monkeypatch.setattr(config, "stand_in", None)
    assert kernels(tensors, Options()) == ["attention_forward"]
    name = "flashpoint_kernels.triton_backend.hopper.gluon"
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="need a GPU of sm_90: Triton's interpreter does not run Gluon"):
        import_module(name)
