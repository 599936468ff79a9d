"""`Options` turns NumPy numbers into Python numbers and lists into tuples; its error names every wrong field."""

import numpy as np
import pytest

from flashpoint_contract.options import OPTIONS, Options, ProblemError


def test_numbers_of_numpy_and_lists_become_pythons():
    options = Options(window=np.array([3, 0]), scale=np.float32(0.5), causal=np.bool_(True), grads=["dk", "dq"])
    assert options == Options(window=(3, 0), scale=0.5, causal=True, grads=("dk", "dq"))
    assert hash(options) == hash(Options(window=(3, 0), scale=0.5, causal=True, grads=("dk", "dq")))
    assert all(type(value) is int for value in options.window)
    assert type(options.scale) is float
    assert Options(window=None).window == (-1, -1)


def test_every_wrong_field_is_named_at_once():
    with pytest.raises(ProblemError) as wrong:
        Options(causal=1, window=(3,), scale=float("nan"), softcap=1e-40, dropout_p=1.0, grads=("dq", "dq"))
    assert [error.field for error in wrong.value.errors] == [
        "causal", "window", "scale", "softcap", "dropout_p", "grads",
    ]  # fmt: skip
    assert "grads: names a gradient twice" in str(wrong.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_is_valid_and_another_value_than_the_default(name):
    row = OPTIONS[name]
    options = Options(**{name: row.example})
    assert getattr(options, name) == row.example != row.default
    assert getattr(Options(), name) == row.default
    assert row.asks(row.example) or row.when is not None
    assert not row.asks(row.default)
