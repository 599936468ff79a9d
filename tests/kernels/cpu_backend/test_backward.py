"""The gradient in C has the same bits for any number of threads, division into parts, strides and layout."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, attention, attention_backward
from flashpoint_kernels.cpu_backend.backward import differentiate
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.native import backward as parts
from tests.support.covering import cover
from tests.support.kernels.solving import backward, check, forward, normal, qkv

GRADS = ("dq", "dk", "dv")


@pytest.mark.parametrize("shape", [(2, 4, 500, 300), (4, 500, 300), (500, 300), (2, 1, 1, 300), (4, 500, 1)], ids=str)
def test_the_gradient_of_a_shared_mask_has_the_same_bits_on_any_number_of_threads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_ROWS", 128)
    monkeypatch.setattr(parts, "_LEAST_FLOPS", 1)
    t = qkv(2, 4, 500, 300, 16, kv_heads=2) | {"attn_mask": normal(*shape)}
    check("cpu", t, grads=[*GRADS, "dattn_mask"], causal=True)
    t |= forward("cpu", t, causal=True)
    results = []
    for threads in (1, 2, 3, 5, 16):
        problem = Problem.create(t, Options(causal=True, grads=[*GRADS, "dattn_mask"]), "backward")
        differentiate(problem, threads)
        results.append(problem.outputs)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in other)
    if shape[0] != 2:  # sequences share the mask
        separate = [
            backward("cpu", {n: x if n == "attn_mask" else x[b : b + 1] for n, x in t.items()}, causal=True,
                     grads=["dattn_mask"])["dattn_mask"]
            for b in range(2)
        ]  # fmt: skip
        assert torch.equal(separate[0] + separate[1], results[0]["dattn_mask"])


@cover(
    options={"plain": {}, "causal": {"causal": True}, "window": {"window": (700, 90)}, "dropout": {"dropout_p": 0.3}},
    kv_heads=[1, 2],
)
def test_parts_of_a_sequence_agree_with_float64_and_have_the_same_bits_on_any_number_of_threads(
    options: dict[str, Any], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_ROWS", 128)
    monkeypatch.setattr(parts, "_LEAST_FLOPS", 1)
    if "dropout_p" in options:
        options = options | {"dropout_seed": 11}
    t = qkv(2, 2, 900, 700, 32, kv_heads=kv_heads) | {"sinks": normal(2)}
    check("cpu", t, **options, grads=[*GRADS, "dsinks"])
    t |= forward("cpu", t, **options)
    results = []
    for threads in (1, 2, 3, 5, 16):
        problem = Problem.create(t, Options(**options, grads=[*GRADS, "dsinks"]), "backward")
        differentiate(problem, threads)
        results.append(problem.outputs)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in other)


def test_bits_are_those_of_a_sequence_alone_however_it_is_cut() -> None:
    t = qkv(3, 4, 150, 190, 40, kv_heads=2) | {"attn_mask": normal(3, 4, 150, 190)}
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.25, "dropout_seed": 5, "grads": [*GRADS, "dattn_mask"]}
    t |= {"q_lengths": torch.tensor([150, 7, 90]), "kv_lengths": torch.tensor([190, 190, 33])}
    t |= forward("cpu", t, **{name: value for name, value in options.items() if name != "grads"})
    whole = backward("cpu", t, **options)
    problem = Problem.create(t, Options(**options), "backward")
    for b in range(3):
        for head in range(2):
            part = problem.of_rows(b, b + 1).heads(head, head + 1)
            run_part(part, "cpu")
    assert all(torch.equal(problem.outputs[name], whole[name]) for name in whole)


def test_strided_and_packed_tensors_have_the_same_bits() -> None:
    t = qkv(2, 4, 90, 90, 32, kv_heads=2)
    t |= forward("cpu", t, causal=True)
    expected = backward("cpu", t, causal=True)
    transposed = {n: x if n == "lse" else x.transpose(1, 2) for n, x in t.items()}
    strided = backward("cpu", {n: x if n == "lse" else x.contiguous() for n, x in transposed.items()}, causal=True,
                       layout="bshd")  # fmt: skip
    packed = {n: x.transpose(0, 1).reshape(4, -1) if n == "lse" else x.flatten(0, 1) for n, x in transposed.items()}
    edges = {f"cu_seqlens_{name}": torch.tensor([0, 90, 180]) for name in "qk"}
    ragged = backward("cpu", packed | edges, causal=True, layout="thd")
    columns = {n: x if n == "lse" else x.mT.contiguous().mT for n, x in t.items()}  # elements of a row are not adjacent
    for name, grad in expected.items():
        assert torch.equal(strided[name].transpose(1, 2), grad)
        assert torch.equal(ragged[name].view(2, 90, *grad.shape[1::2]).transpose(1, 2), grad)
        assert torch.equal(backward("cpu", columns, causal=True)[name], grad)


def test_only_what_is_asked_for_is_computed() -> None:
    t = qkv(1, 2, 70, 90, 16) | {"attn_mask": normal(1, 2, 70, 90)}
    t |= forward("cpu", t)
    every = backward("cpu", t, grads=[*GRADS, "dattn_mask"])
    for name, grad in every.items():
        (alone,) = attention_backward(**t, grads=[name], backend="cpu")
        assert torch.equal(alone, grad)


def test_plain_calls_and_the_general_path_have_the_same_bits() -> None:
    for layout in ("bhsd", "bshd"):
        leaves = {n: x.requires_grad_() for n, x in qkv(1, 3, 70, 70, 48).items() if n != "do"}
        o, lse = attention(**leaves, layout=layout, return_lse=True)
        plain = torch.autograd.grad(o.square().sum(), list(leaves.values()), retain_graph=True)
        t = {n: x.detach() for n, x in leaves.items()} | {"o": o.detach(), "lse": lse.detach()}
        general = attention_backward(2 * t["o"], **t, layout=layout)
        assert all(torch.equal(one, other) for one, other in zip(plain, general, strict=True))
