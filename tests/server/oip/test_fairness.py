"""A small request is answered between the parts of a large one, and a cancelled request starts no further part."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.gated import parts_of, wait_for_parts
from tests.support.oip.grpc_calls import HANG, request
from tests.support.oip.held import ALL
from tests.support.oip.message import infer, wanted
from tests.support.short_sequences import short_sequences

KEY = dict(ALL)


def large_call(held, name):
    tensors, options = short_sequences("plain", dim=1)
    question = request(tensors, outputs=["o"], **options)
    return held.caller.begin(question, metadata=(*ALL, ("x-request-id", name)))


def small(held):
    return infer(held.server.url, "attention", {name: torch.ones(1, 2, 3, 4) for name in "qkv"}, headers=KEY)


@pytest.mark.slow
def test_over_grpc(held):
    with held.shut("step") as name:
        large = large_call(held, name)
        wait_for_parts(held.server, name, 2, large.done)  # the second part waits at its gate
        assert small(held).status == 200
        assert not large.done()
    assert large.result(HANG)
    wait_for_parts(held.server, name, 3)


@pytest.mark.slow
def test_over_http(held):
    tensors, options = short_sequences("plain", dim=1)
    with ThreadPoolExecutor(1) as pool, held.shut("step") as name:
        how = {"headers": {**KEY, "x-request-id": name}, "outputs": [wanted("o", binary_data=True)]}
        large = pool.submit(infer, held.server.url, "attention", tensors, parameters=options, **how)
        wait_for_parts(held.server, name, 2, large.done)  # the second part waits at its gate
        assert small(held).status == 200
        assert not large.done()
    assert torch.equal(large.result().tensors["o"], torch.ones_like(tensors["q"]))
    wait_for_parts(held.server, name, 3)


@pytest.mark.slow
def test_a_cancelled_call_begins_no_further_part(held):
    with held.shut("step") as name:
        large = large_call(held, name)
        wait_for_parts(held.server, name, 2, large.done)  # the second part waits at its gate
        large.cancel()
        held.wait_dropped(name)
    held.wait_inside(0)
    assert small(held).status == 200
    assert len(parts_of(held.server, name)) == 2
