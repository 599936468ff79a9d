"""An answer has the requested outputs, as numbers or bytes, and is compressed if the client accepts this."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.oip.message import LENGTH, PACK, UNPACK, infer, wanted
from tests.support.oip.problem import BOUNDS, GRAD, near, problem, truth

SMALL = problem()


@pytest.mark.parametrize(
    ("parameters", "outputs", "binary"),
    [
        (None, None, {"o": False}),
        ({"binary_data_output": True}, None, {"o": True}),
        ({"binary_data_output": True, "return_lse": True}, None, {"o": True, "lse": True}),
        ({"binary_data_output": True}, [wanted("o"), wanted("lse", binary_data=False)], {"o": True, "lse": False}),
        ({"binary_data_output": False}, [wanted("lse", binary_data=True)], {"lse": True}),
        ({"return_lse": True}, [wanted("o", binary_data=True)], {"o": True}),
    ],
)
def test_which_outputs_come_and_how(url, parameters, outputs, binary):
    reply = infer(url, "attention", SMALL, parameters=parameters, outputs=outputs)
    expected = truth(SMALL)
    assert list(reply.tensors) == list(binary)
    for output in reply.head["outputs"]:
        assert ("data" in output) != binary[output["name"]]
        assert ("binary_data_size" in output.get("parameters", {})) == binary[output["name"]]
        near(reply.tensors[output["name"]], expected[output["name"]], BOUNDS[torch.float32])
    if any(binary.values()):
        assert int(reply.headers[LENGTH]) % 64 == 0, "the tensors after the JSON are not aligned"


@pytest.mark.parametrize(
    ("parameters", "outputs", "names"),
    [
        ({"grads": "dv"}, None, ["dv"]),
        ({"grads": "dv, dq"}, None, ["dv", "dq"]),
        ({}, ["dk"], ["dk"]),
        ({}, ["dv", "dq"], ["dv", "dq"]),
        ({"grads": "dq,dk,dv"}, ["dk"], ["dk"]),
    ],
)
def test_which_gradients_come(url, parameters, outputs, names):
    tensors = problem(names=GRAD)
    requested = [wanted(name, binary_data=True) for name in outputs] if outputs else None
    reply = infer(url, "attention_grad", tensors, parameters=parameters, outputs=requested)
    expected = truth(tensors)
    assert list(reply.tensors) == names
    for name in names:
        near(reply.tensors[name], expected[name], 2 * BOUNDS[torch.float32])


@pytest.mark.parametrize("coding", PACK)
def test_an_answer_is_compressed_where_that_alone_is_accepted(url, coding):
    parameters = {"binary_data_output": True}
    reply = infer(url, "attention", SMALL, headers={"accept-encoding": coding}, parameters=parameters)
    assert reply.headers["content-encoding"] == coding
    reply.body = UNPACK[coding](reply.body)
    near(reply.tensors["o"], truth(SMALL)["o"], 2e-6)


@pytest.mark.parametrize("accepted", ["gzip, deflate, br", "gzip, deflate", "*", "identity", "br", "gzip;q=0"])
def test_nothing_else_is_compressed(url, accepted):
    """With any other Accept-Encoding, nothing is compressed: some clients accept codings that they do not decode."""
    parameters = {"binary_data_output": True}
    reply = infer(url, "attention", SMALL, headers={"accept-encoding": accepted}, parameters=parameters)
    assert "content-encoding" not in reply.headers
    near(reply.tensors["o"], truth(SMALL)["o"], 2e-6)


KEY = {"authorization": "Bearer all"}


WIDE = {name: torch.zeros(1, 1, 64, 256) for name in "qkv"}  # o: 64 KiB, the limit of JSON answers in `locked`


def test_an_answer_in_numbers_has_a_limit_and_one_in_bytes_has_none(locked):
    wide = {**WIDE, "q": torch.zeros(1, 1, 65, 256)}
    assert infer(locked.url, "attention", wide, headers=KEY).status == 413
    outputs = [wanted("o", binary_data=True), wanted("lse", binary_data=False)]
    assert infer(locked.url, "attention", wide, headers=KEY, outputs=outputs).status == 200
