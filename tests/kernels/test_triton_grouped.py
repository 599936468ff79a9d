"""In one grouped launch of any mix of requests, every answer has the bits that it has alone."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.grouped import Launch
from tests.conftest import DEVICE, INTERPRETING
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of


def _request(rng: random.Random, seed: int, options: dict[str, object], *, dim: int = 16) -> dict[str, torch.Tensor]:
    """Return tensors of a request with random lengths, batch and head counts, in the layout of `options`."""
    g = torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    batch, q_len, kv_len = rng.choice([1, 1, 2]), rng.choice([1, 5, 33]), rng.choice([1, 7, 40, 70])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DEVICE)

    heads = kv_heads * group
    if options["layout"] == "thd":
        cu_q, cu_k = [0, 3, 3, 3 + q_len], [0, kv_len, kv_len + 2, kv_len + 4]
        q, k, v = normal(cu_q[-1], heads, dim), normal(cu_k[-1], kv_heads, dim), normal(cu_k[-1], kv_heads, dim)
        lengths = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    else:
        shape = (lambda s, h: (batch, h, s, dim)) if options["layout"] == "bhsd" else (lambda s, h: (batch, s, h, dim))
        q, k, v = normal(*shape(q_len, heads)), normal(*shape(kv_len, kv_heads)), normal(*shape(kv_len, kv_heads))
        lengths = (
            {"kv_lengths": torch.tensor([rng.randint(0, kv_len) for _ in range(batch)])} if rng.random() < 0.3 else {}
        )
    if seed % 2:
        sequences = 3 if options["layout"] == "thd" else batch
        lengths["offset"] = torch.linspace(-2, kv_len, sequences).long()
    return {"q": q, "k": k, "v": v, **lengths}


def _run_forward(requests: list[tuple[dict[str, torch.Tensor], Options]]) -> list[dict[str, torch.Tensor]]:
    problems = [Problem.create(tensors, options) for tensors, options in requests]
    assert len({launch_key(p.spec, "triton") for p in problems}) == 1
    for problem in problems:
        for t in problem.outputs.values():
            t.fill_(float("nan"))
    launch.forward(problems)
    return [p.outputs for p in problems]


def _run_backward(requests: list[tuple[dict[str, torch.Tensor], Options]]) -> list[dict[str, torch.Tensor]]:
    problems = [Problem.create(tensors, options, "backward") for tensors, options in requests]
    for problem in problems:
        for t in problem.outputs.values():
            t.fill_(float("nan"))
    launch.backward(problems)
    return [p.outputs for p in problems]


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
        requests.append((_request(rng, n, plain), Options(**plain, return_lse=True)))
    grouped = _run_forward(requests)
    for at, (request, answer) in enumerate(zip(requests, grouped, strict=True)):
        assert not any(t.isnan().any() for t in answer.values())
        (alone,) = _run_forward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer), at
        do = torch.randn(answer["o"].shape, generator=torch.Generator().manual_seed(at)).to(DEVICE)
        gradients.append(({**request[0], **answer, "do": do}, request[1]))
    for at, (request, answer) in enumerate(zip(gradients, _run_backward(gradients), strict=True)):
        assert not any(t.isnan().any() for t in answer.values())
        (alone,) = _run_backward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer), at


@pytest.mark.slow
def test_a_sequence_has_its_bits_first_middle_last_and_in_any_batch() -> None:
    """A sequence alone also equals the same sequence in a request with B = 3."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((3, 2, s, 16), generator=g).to(DEVICE) for s in (70, 90, 90))
    options = Options(causal=True, return_lse=True)
    (batch,) = _run_forward([({"q": q, "k": k, "v": v}, options)])
    for b in range(3):
        one = ({"q": q[b : b + 1], "k": k[b : b + 1], "v": v[b : b + 1]}, options)
        for neighbours in ([one], [one, one], [({"q": k, "k": q, "v": q}, options), one]):
            answer = _run_forward(neighbours)[-1]
            assert torch.equal(answer["o"][0], batch["o"][b])
            assert torch.equal(answer["lse"][0], batch["lse"][b])


@pytest.mark.slow
def test_a_mask_gradient_summed_over_the_batch_equals_itself_alone() -> None:
    rng = random.Random(3)
    requests = []
    for n in range(6):
        tensors = _request(rng, n, {"layout": "bhsd"})
        q, k = tensors["q"], tensors["k"]
        shapes = [(1, 1, q.shape[2], k.shape[2]), (q.shape[0], 1, 1, k.shape[2]), (1, q.shape[1], 1, 1)]
        shape = shapes[n % 3]
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(DEVICE)
        options = Options(return_lse=True, grads=("dq", "dattn_mask"))
        tensors["attn_mask"] = mask
        (answer,) = _run_forward([(tensors, options)])
        requests.append(({**tensors, **answer, "do": torch.ones_like(answer["o"])}, options))
    for request, answer in zip(requests, _run_backward(requests), strict=True):
        (alone,) = _run_backward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer)
        assert not any(t.isnan().any() for t in answer.values())


@pytest.mark.parametrize(
    "case", [*SCRATCH[2:3], *(pytest.param(case, marks=pytest.mark.slow) for case in SCRATCH if case != SCRATCH[2])],
    ids=name_of,
)  # fmt: skip
def test_what_scratch_held_before_changes_no_bit(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels load scratch in whole blocks: unwritten parts and neighbouring memory, here NaN, must not matter."""
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
    """50 repeats on a GPU would show a race. The interpreter cannot race; there they show that no state is left."""
    rng = random.Random(5)
    options = Options(causal=True, return_lse=True, dropout_p=0.2, dropout_seed=3)
    tensors = _request(rng, 5, {"layout": "bhsd"})
    (first,) = _run_forward([(tensors, options)])
    gradient = ({**tensors, **first, "do": torch.ones_like(first["o"])}, options)
    (expected,) = _run_backward([gradient])
    for _ in range(1 if INTERPRETING else 50):
        assert all(torch.equal(t, first[name]) for name, t in _run_forward([(tensors, options)])[0].items())
        assert all(torch.equal(t, expected[name]) for name, t in _run_backward([gradient])[0].items())
