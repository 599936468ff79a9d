"""In one launch of any mix of requests, every answer has the same bits as in a launch of its own."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.grouped import Launch
from tests.conftest import DEVICE, INTERPRETING
from tests.support.kernels.mixed_requests import drawn_request, run_backward, run_forward
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of

EVERY = {"dropout_p": 0.25, "softcap": 8.0}
SCRATCH: list[dict[str, Any]] = [
    PLAIN | {"dtype": "float16", "band": "causal", "group": 2},
    PLAIN | {"layout": "thd", "group": 2, "dlse": True},
    PLAIN | {"lengths": True, "mask": "full", "sinks": True, "dropout": True},
    PLAIN | {"layout": "bshd", "mask": "keys", "band": "window", "softcap": 3.0},
]


@pytest.mark.parametrize(
    ("seed", "count", "features"),
    [
        pytest.param(10, 5, EVERY, id="every-option"),  # this seed draws each layout and each mask
        pytest.param(7, 16, {}, marks=pytest.mark.slow, id="fast-variant"),
        pytest.param(7, 64, EVERY, marks=pytest.mark.full, id="many"),
    ],
)
def test_mixed_requests_in_one_launch_equal_each_alone(seed: int, count: int, features: dict[str, float]) -> None:
    rng = random.Random(seed)
    requests, gradients = [], []
    for n in range(count):
        plain = {"layout": rng.choice(["bhsd", "bshd", "thd"]), "causal": rng.random() < 0.5, **features}
        if features:
            plain |= {"dropout_seed": rng.getrandbits(63), "window": rng.choice([(-1, -1), (9, 3)])}
        tensors = drawn_request(rng, n, plain)
        if features and n % 2:
            heads = tensors["q"].shape[2 if plain["layout"] == "bshd" else 1]
            tensors["sinks"] = torch.linspace(-1, 1, heads).to(DEVICE)
        requests.append((tensors, Options(**plain, return_lse=True)))
    grouped = run_forward(requests)
    for at, (request, answer) in enumerate(zip(requests, grouped, strict=True)):
        assert not any(t.isnan().any() for t in answer.values())
        (alone,) = run_forward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer), at
        do = torch.randn(answer["o"].shape, generator=torch.Generator().manual_seed(at)).to(DEVICE)
        grads = ("dq", "dk", "dv", *(("dsinks",) if "sinks" in request[0] else ()))
        gradients.append(({**request[0], **answer, "do": do}, replace(request[1], grads=grads)))
    for at, (request, answer) in enumerate(zip(gradients, run_backward(gradients), strict=True)):
        assert not any(t.isnan().any() for t in answer.values())
        (alone,) = run_backward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer), at


@pytest.mark.slow
def test_a_sequence_has_its_bits_first_middle_last_and_in_any_batch() -> None:
    """A sequence has the same bits alone, first, middle or last in any batch, and in a request with B = 3."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((3, 2, s, 16), generator=g).to(DEVICE) for s in (70, 90, 90))
    options = Options(causal=True, return_lse=True)
    (batch,) = run_forward([({"q": q, "k": k, "v": v}, options)])
    for b in range(3):
        one = ({"q": q[b : b + 1], "k": k[b : b + 1], "v": v[b : b + 1]}, options)
        for neighbours in ([one], [one, one], [({"q": k, "k": q, "v": q}, options), one]):
            answer = run_forward(neighbours)[-1]
            assert torch.equal(answer["o"][0], batch["o"][b])
            assert torch.equal(answer["lse"][0], batch["lse"][b])


@pytest.mark.parametrize(
    "case", [*SCRATCH[2:3], *(pytest.param(case, marks=pytest.mark.slow) for case in SCRATCH if case != SCRATCH[2])],
    ids=name_of,
)  # fmt: skip
def test_what_scratch_held_before_changes_no_bit(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Old contents of scratch memory change no bit: here, they and the memory around them are NaN."""
    tensors, options = tensors_of(case, 70 if case["group"] > 1 else 37, 70), options_of(case)

    def answers() -> dict[str, torch.Tensor]:
        inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse")}
        forward = Problem.create(inputs, replace(options, return_lse=True, grads=Options().grads))
        launch.forward([forward])
        backward = Problem.create({**tensors, **forward.outputs}, options, "backward")
        launch.backward([backward])
        return {**forward.outputs, **backward.outputs}

    expected, beside, made = answers(), 1024, []

    def scratch(launch: Launch, size: int) -> torch.Tensor:
        made.append(torch.full((size + 2 * beside,), float("nan"), device=launch.device))
        return made[-1][beside : beside + size]

    monkeypatch.setattr(Launch, "scratch", scratch)
    assert all(torch.equal(t, expected[name]) for name, t in answers().items())
    assert any(len(memory) > 2 * beside for memory in made)
    assert all(memory[:beside].isnan().all() and memory[-beside:].isnan().all() for memory in made)


def test_repeats_are_bitwise_equal() -> None:
    """On a GPU, 50 repeats would show a race. In the interpreter, a repeat shows that a call leaves no state."""
    rng = random.Random(5)
    options = Options(causal=True, return_lse=True, dropout_p=0.2, dropout_seed=3)
    tensors = drawn_request(rng, 5, {"layout": "bhsd"})
    (first,) = run_forward([(tensors, options)])
    gradient = ({**tensors, **first, "do": torch.ones_like(first["o"])}, options)
    (expected,) = run_backward([gradient])
    for _ in range(1 if INTERPRETING else 50):
        assert all(torch.equal(t, first[name]) for name, t in run_forward([(tensors, options)])[0].items())
        assert all(torch.equal(t, expected[name]) for name, t in run_backward([gradient])[0].items())
