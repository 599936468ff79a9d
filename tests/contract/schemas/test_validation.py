"""The error about an invalid request names each wrong field and says what is allowed, without pydantic's wording."""

import json
import math

import pytest
from pydantic import ValidationError

from flashpoint import BenchmarkRequest, VerifyRequest
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.schemas.validation import field_problems

DRAWN = {"shape": {"q_len": 16, "head_dim": 8}}
GRID = {"shapes": [DRAWN["shape"]]}
ONE_OF = "must be 'dq', 'dk', 'dv', 'dattn_mask' or 'dsinks'"


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (VerifyRequest, {"window": 5}, [("window", OPTIONS["window"].kind.message)]),
        (VerifyRequest, {"window": [1]}, [("window", "item 2 is missing")]),
        (VerifyRequest, {"window": [1, 2, 3]}, [("window", "takes 2 at most, not 3")]),
        (VerifyRequest, {"window": [-2, 0]}, [("window", "must be greater than or equal to -1")]),
        (VerifyRequest, {"grads": ["dz"]}, [("grads", ONE_OF)]),
        (VerifyRequest, {"grads": []}, [("grads", "takes 1 at least, not 0")]),
        (VerifyRequest, {"grads": ["dq", "dq"]}, [("grads", "names a gradient twice")]),
        (VerifyRequest, {"causal": "yes"}, [("causal", "must be true or false")]),
        (VerifyRequest, {"seed": "1"}, [("seed", "must be an integer")]),
        (VerifyRequest, {"seed": 1.5}, [("seed", "must be an integer")]),
        (VerifyRequest, {"scale": "1"}, [("scale", "must be a number")]),
        (VerifyRequest, {"scale": math.nan}, [("scale", "must be a finite number")]),
        (VerifyRequest, {"softcap": 1e-40}, [("softcap", "must be 0 (off) or within float32's normal range")]),
        (VerifyRequest, {"shape": {"q_len": 64}}, [("shape.head_dim", "is missing")]),
        (VerifyRequest, {"shape": 64}, [("shape", "must be an object")]),
        (VerifyRequest, {"casual": True}, [("casual", "unknown option or tensor; did you mean causal?")]),
        (
            VerifyRequest,
            {"caches": ["c"]},
            [
                (
                    "caches",
                    "is only for POST /attention over caches, in JSON or safetensors, and for the SDK's attention",
                )
            ],
        ),
        (BenchmarkRequest, {"dtypes": ["float64"]}, [("dtypes", "must be 'float16', 'bfloat16' or 'float32'")]),
        (BenchmarkRequest, {"backends": [3]}, [("backends", "must be a string")]),
        (BenchmarkRequest, {"shapes": []}, [("", "name a preset, or shapes to time")]),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_refused_is_said_in_words_of_the_contract(model, change, message, as_json):
    document = {**(DRAWN if model is VerifyRequest else GRID), **change}
    with pytest.raises(ValidationError) as info:
        model.model_validate_json(json.dumps(document)) if as_json else model.model_validate(document)
    assert field_problems(info.value) == message


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [
        (BenchmarkRequest, "backend", "backends"),
        (BenchmarkRequest, "dtype", "dtypes"),
        (BenchmarkRequest, "shape", "shapes"),
        (BenchmarkRequest, "q_len", None),
        (VerifyRequest, "shapes", "shape"),
        (VerifyRequest, "mask", None),
    ],
)
def test_an_unknown_name_is_compared_with_the_names_of_its_document(model, name, meant):
    with pytest.raises(ValidationError) as info:
        model.model_validate({**(DRAWN if model is VerifyRequest else GRID), name: 1})
    hint = f"; did you mean {meant}?" if meant else ""
    assert field_problems(info.value, model.model_fields) == [(name, f"unknown option or tensor{hint}")]
