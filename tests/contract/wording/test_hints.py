"""An error about an unknown dtype, model, version or claim suggests the closest known name."""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.wire import WireError, parse_head
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.reproduction.claims import reproduce
from flashpoint_server.oip import models
from flashpoint_server.oip.head import parse
from flashpoint_server.refusal import Refusal


def safetensors(dtype):
    head = json.dumps({"q": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    return parse_head(len(head).to_bytes(8, "little") + head)


def infer(datatype):
    tensor = {"name": "q", "shape": [1, 1], "datatype": datatype, "data": [1]}
    return parse(json.dumps({"inputs": [tensor]}).encode())


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        (safetensors, "F23", "'q' has unknown dtype 'F23'; use .*; did you mean F32[?]"),
        (safetensors, "float32", "did you mean F32[?]"),
        (safetensors, "bf61", "did you mean BF16[?]"),
        (infer, "FP23", "datatype 'FP23' is not one of .*; did you mean FP32[?]"),
        (lambda version: models.find("attention", version), "v1", "has only version 1, not 'v1'; did you mean 1[?]"),
        (models.find, "atention", "model 'atention' does not exist; use .*; did you mean attention[?]"),
        (
            lambda claim: reproduce([claim]),
            "equation",
            "'equation' does not exist; .*; did you mean equations[?]",
        ),
        (lambda dtype: Case.from_dict({"dtype": dtype}), "flaot16", "not 'flaot16'; did you mean float16[?]"),
    ],
)
def test_the_probable_name_is_suggested(call, wrong, message):
    with pytest.raises((ValueError, WireError, Refusal), match=message):
        call(wrong)


def test_nothing_is_suggested_for_what_resembles_nothing():
    with pytest.raises(Refusal, match=r"not '7'$"):
        models.find("attention", "7")
