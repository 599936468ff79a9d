"""`split` extracts the raw tensors of a protobuf message without a copy, or refuses a damaged message."""

import contextlib

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.wire import WireError
from flashpoint_server.oip.grpc.framing import before, split
from flashpoint_server.oip.grpc.request import RAW_INPUTS, parse
from tests.support.oip.grpc_calls import Request, request
from tests.support.oip.message import raw


def test_a_message_that_is_cut_or_marred_anywhere_is_read_or_refused():
    """A message that is cut or changed at any byte is refused, or has the tensors that protobuf's parser finds."""
    small = {name: torch.ones(1, 1) for name in "qkv"}
    whole = request(small, outputs=["o"], id="cut", causal=True).SerializeToString()
    rest, tensors = split(whole, RAW_INPUTS)
    assert [bytes(tensor) for tensor in tensors] == [raw(t) for t in small.values()]
    assert rest + b"".join(before(RAW_INPUTS, len(t)) + bytes(t) for t in tensors) == whole
    read = 0
    places = range(len(whole))
    marred = (bytes([*whole[:i], byte, *whole[i + 1 :]]) for i in places for byte in (0, 127, 255))
    for message in (*(whole[:i] for i in places), *marred):
        with contextlib.suppress(WireError, FieldError):
            text, tensors = split(message, RAW_INPUTS)
            parse(text, tuple(map(len, tensors)))
            assert Request.FromString(message).raw_input_contents == [bytes(tensor) for tensor in tensors]
            read += 1
    assert read
