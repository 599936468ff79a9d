"""`plan_saved` plans a forward that the server saves; its gradients have `recalled_options`, and need only `do`."""

import pytest

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.saved import (
    SAVED_BYTES,
    plain,
    plan_saved,
    recalled_options,
    refused,
    refused_beside,
    saved_bytes,
    saved_tensors,
)
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo

TENSORS = {name: TensorInfo("float32", (1, 2, 3, 4)) for name in "qkv"}


def test_gradients_of_a_saved_forward_need_do_alone():
    forward = plan_saved(TENSORS, Options(causal=True, scale=0.5))
    assert forward.options.return_lse
    assert saved_bytes(forward) == SAVED_BYTES + 4 * 24 * 4 + 6 * 4
    options = recalled_options(forward, {"grads": ("dv",), "deterministic": False})
    backward = plan(saved_tensors(forward) | {"do": TENSORS["q"]}, options, "backward")
    assert (backward.direction, backward.options.grads, backward.options.deterministic) == ("backward", ("dv",), False)
    assert (backward.options.causal, backward.options.scale, backward.has_forward) == (True, 0.5, True)
    assert backward.outputs == {"dv": TENSORS["v"]}
    with pytest.raises(ProblemError, match="do: missing"):
        plan(saved_tensors(forward), options, "backward")


def test_what_has_no_gradient_is_not_saved():
    eight_bit = TENSORS | dict.fromkeys("kv", TensorInfo("int8", (1, 2, 3, 4)))
    with pytest.raises(ProblemError, match="k_scale: has no gradient: omit `save`"):
        plan_saved(eight_bit | {"k_scale": TensorInfo("float32", ())}, Options())


def test_options_about_saving_are_refused_where_they_are_not_taken():
    assert refused({"save": False, "saved": None, "causal": True}) == []
    assert dict(refused({"save": True}))["save"].startswith("is only for POST /attention, ")
    assert dict(refused({"saved": "x"}))["saved"].startswith("is only for POST /attention/grad, ")
    assert refused({"save": 1}) == [("save", "must be true or false")]
    assert plain({"save": True, "saved": None, "causal": True}) == {"causal": True}
    assert [name for name, _ in refused_beside(["do", "q"], ["grads", "causal", "saved"])] == ["q", "causal"]
