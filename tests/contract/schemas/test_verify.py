"""`VerifyRequest` has the attention options as fields, and refuses unknown ones."""

import json

import pytest
from pydantic import ValidationError

from flashpoint import VerifyRequest


def test_a_verification_takes_the_options_of_every_call():
    body = {"shape": {"q_len": 64, "head_dim": 32}, "causal": True, "window": [8, 0], "extras": ["sinks"], "seed": 3}
    request = VerifyRequest.model_validate_json(json.dumps(body))
    assert (request.causal, request.window, request.extras, request.direction) == (True, (8, 0), ("sinks",), "both")
    with pytest.raises(ValidationError, match="casual"):
        VerifyRequest.model_validate({**body, "casual": True})
