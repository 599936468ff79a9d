"""The options of a problem become arguments of the judge, which is found by a package entry point."""

import pytest

import flashpoint
from flashpoint import judging
from flashpoint._calls.service import checked


def test_a_shape_and_options_become_one_case():
    shape = checked(flashpoint.Shape, {"q_len": 5, "head_dim": 8, "q_heads": 4, "kv_heads": 2})
    sizes = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 5, "kv_len": 5, "head_dim": 8, "value_dim": 8}
    given = {"shape": shape, "dtype": "bfloat16", "seed": 3, "direction": "forward", "layout": "bshd", "causal": True}
    assert judging.judge_arguments({**given, "extras": ("bool_mask", "sinks")}) == {
        "seed": 3, "dtype": "bfloat16", "layout": "bshd",
        "only": {**sizes, "forward": True, "mask": "bool", "extras": ("sinks",), "causal": True},
    }  # fmt: skip
    assert judging.judge_arguments({}) == {}


@pytest.mark.parametrize("name", ["backend", "grads", "dropout_p", "block_size"])
def test_an_option_that_no_function_of_the_caller_has_is_refused(name):
    with pytest.raises(flashpoint.InvalidInputError, match=f"{name}: is not an option of a function that is judged"):
        judging.judge_arguments({name: 1})


def test_the_judge_is_the_registered_one(monkeypatch):
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    from flashpoint_kernels.judging import judge

    assert judging.registered() is judge
    monkeypatch.setattr(judging, "GROUP", "flashpoint.nothing")
    with pytest.raises(ModuleNotFoundError, match="registers no judge") as error:
        judging.registered()
    assert error.value.name == "flashpoint_kernels"
