"""`AttentionOptions` (pydantic) and `spec.Options` agree in field names, defaults, and accepted and refused values."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from flashpoint_contract import options as spec
from flashpoint_contract.schemas.options import AttentionOptions


def test_the_wire_and_the_kernels_agree_in_names_and_defaults():
    ours = {name: field.default for name, field in AttentionOptions.model_fields.items()}
    assert ours == {field.name: field.default for field in fields(spec.Options)}
    assert spec.Options(**AttentionOptions().model_dump()) == spec.Options()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("causal", "true"), ("causal", 1), ("causal", None), ("return_lse", 0), ("deterministic", "no"),
        ("window", 3), ("window", [1]), ("window", [1, 2, 3]), ("window", [-2, 0]), ("window", [0, (1 << 30) + 1]),
        ("window", [True, 0]), ("window", ["1", 0]), ("window", [0.0, 1]), ("window", "12"),
        ("scale", True), ("scale", "1"), ("scale", float("nan")), ("scale", float("inf")), ("scale", 10**400),
        ("softcap", -1), ("softcap", None), ("softcap", False), ("dropout_p", 1), ("dropout_p", -0.1),
        ("dropout_seed", -1), ("dropout_seed", 1 << 64), ("dropout_seed", True), ("dropout_seed", 1.0),
        ("precision", "fp8"), ("layout", "sbhd"), ("causal_alignment", ""), ("backend", "cuda"), ("backend", None),
        ("grads", []), ("grads", ["dq", "dq"]), ("grads", ["do"]), ("grads", "dq"), ("casual", True),
    ],
)  # fmt: skip
def test_what_one_refuses_so_does_the_other(field, value):
    with pytest.raises(ValidationError) as info:
        AttentionOptions.model_validate({field: value})
    assert {error["loc"][0] for error in info.value.errors()} == {field}
    with pytest.raises((spec.ProblemError, TypeError, OverflowError)):
        spec.Options(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("window", [128, 0], (128, 0)), ("window", (1 << 30, -1), (1 << 30, -1)), ("scale", 1, 1.0),
        ("scale", -0.5, -0.5),
        ("softcap", 30, 30.0), ("dropout_p", 0, 0.0), ("dropout_seed", (1 << 64) - 1, (1 << 64) - 1),
        ("grads", ["dsinks", "dq"], ("dsinks", "dq")), ("scale", None, None), ("backend", "reference", "reference"),
    ],
)  # fmt: skip
def test_what_one_takes_so_does_the_other(field, value, kept):
    options = AttentionOptions.model_validate({field: value})
    assert getattr(options, field) == kept
    assert getattr(spec.Options(**options.model_dump()), field) == kept


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        AttentionOptions().causal = True
