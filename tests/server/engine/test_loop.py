"""The engine runs small requests between two parts of a large request.

It starts no further part if the deadline of the large request has passed or its client has left.
"""

import concurrent.futures

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.gated import parts_of, wait_for_parts
from tests.support.messages import message, normal, post, problem
from tests.support.servers import wait_for
from tests.support.short_sequences import KINDS, short_sequences
from tests.support.sockets import nothing_inside, send

SMALL = message({name: normal(1, 2, 5, 8, seed=seed) for seed, name in enumerate("qkv")})


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def step(gated):
    """Close the gate `step`, and open it after the test; yield its file.

    The second part of a request whose id begins with step- waits at this gate.
    """
    gate = gated.gate("step")
    gate.unlink(missing_ok=True)
    yield gate
    gate.touch()


def wait_held(gated, name):
    """Wait until the second part of the request with this id waits at the gate."""
    gated.server.wait_for_line(lambda line: line["event"] == "held" and line["request_id"] == name)


# KINDS[-1] is `reference`: this engine does not cut its requests into parts. The last test of this file has this kind.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "plain" else pytest.mark.slow) for kind in KINDS[:-1]]
)
def test_a_small_request_is_answered_between_the_parts_of_a_large_one(gated, pool, step, kind):
    tensors, options = short_sequences(kind)
    large = gated.post(pool, "step", message(tensors, **options))
    wait_held(gated, large.name)
    assert post(gated.server, "/attention", SMALL).status == 200
    assert not large.done()
    step.touch()
    answer = large.result()
    wait_for_parts(gated.server, large.name, 3)
    if kind == "dropout":
        assert set(answer.tensors["o"].unique().tolist()) == {0.0, 2.0}
    else:
        assert torch.equal(answer.tensors["o"], torch.ones_like(tensors["q"]))


def test_a_request_whose_client_leaves_starts_no_further_part(gated, step):
    tensors, options = short_sequences("plain")
    with send(gated.server, message(tensors, **options), request_id="step-leaves"):
        wait_held(gated, "step-leaves")
    assert gated.server.wait_for_request("step-leaves")["code"] == "client_gone"
    gated.wait_dropped("step-leaves")
    step.touch()
    nothing_inside(gated.server)
    assert post(gated.server, "/attention", SMALL).status == 200
    assert len(parts_of(gated.server, "step-leaves")) == 2


def test_a_late_request_starts_no_further_part(gated, pool, step):
    """A request whose deadline passes while a part runs starts no further part.

    The test doubles the deadline until a request starts its first part in time.
    """
    body = message(short_sequences("plain")[0])
    for doubling in range(8):
        late = gated.post(pool, "step", body, x_timeout_ms=1000 << doubling)
        problem(late.result(), 504, "deadline_exceeded")
        if parts_of(gated.server, late.name):
            break
    gated.wait_dropped(late.name)
    step.touch()
    nothing_inside(gated.server)
    assert post(gated.server, "/attention", SMALL).status == 200
    assert len(parts_of(gated.server, late.name)) in (1, 2)


@pytest.mark.slow
def test_a_small_request_passes_an_exact_one_of_many_sequences(server, pool):
    """A small request is answered before an earlier one that needs 20 s. Then the client of the large one leaves."""
    tensors, options = short_sequences("reference")
    nothing_inside(server)
    with send(server, message(tensors, **options), request_id="exact"):
        wait_for(lambda: server.get("/info")[1]["load"]["requests"], lambda: "it does not arrive")
        assert post(server, "/attention", SMALL).status == 200
        assert server.get("/info")[1]["load"]["requests"]  # at least the large request, or still the small one
        assert not [line for line in list(server.lines) if line.get("request_id") == "exact"]
    assert server.wait_for_request("exact")["code"] == "client_gone"
    nothing_inside(server)
