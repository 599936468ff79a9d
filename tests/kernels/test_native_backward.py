"""The gradient in C is exact for each option, instruction set and dtype, and has the same bits for every split."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import Options, Problem, attention, attention_backward, run, verify
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.native import backward as parts
from flashpoint_kernels.torch_backend.backward import differentiate
from tests.support.kernels.solving import backward, forward, normal, qkv

GRADS = ("dq", "dk", "dv")


def check(t: dict[str, Tensor], **options: Any) -> None:
    report = verify(t, Options(backend="torch", **options))
    assert report.ok, [e for e in report.tensors if not e.ok]


@given(
    kv_heads=st.integers(1, 3), group=st.sampled_from([1, 2, 5]), q_len=st.sampled_from([1, 2, 63, 64, 130, 257]),
    kv_len=st.sampled_from([1, 5, 127, 128, 200, 385]), dim=st.sampled_from([1, 8, 16, 40, 64, 111, 256]),
    value_dim=st.sampled_from([16, 24, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]), causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (63, -1), (20, 5), (5, 200)]), top_left=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 0.7, 30.0]), scale=st.sampled_from([None, -0.2, 0.0]),
    alibi=st.sampled_from([0, 1, 2]), sinks=st.booleans(), layout=st.sampled_from(["bhsd", "bshd"]),
    mask=st.sampled_from(["", "bool", "float", "own", "double", "queries", "keys", "head", "batch", "one"]),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
    dlse=st.booleans(), lengths=st.booleans(), blocks=st.sampled_from([None, None, (16, 16), (48, 80), (128, 128)]),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_any_problem_agrees_with_float64(
    kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, value_dim: int, dtype: torch.dtype, causal: bool,
    window: tuple[int, int], top_left: bool, softcap: float, scale: float | None, alibi: int, sinks: bool, layout: str,
    mask: str, dropout_p: float, dlse: bool, lengths: bool, blocks: tuple[int, int] | None,
) -> None:  # fmt: skip
    heads, grads = kv_heads * group, list(GRADS)
    t = qkv(2, heads, q_len, kv_len, dim, kv_heads=kv_heads, value_dim=value_dim, dtype=dtype)
    if layout == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    if alibi:
        t["alibi_slopes"] = normal(*((heads,) if alibi == 1 else (2, heads))).abs() / 8
    if sinks:
        t["sinks"] = normal(heads)
        grads.append("dsinks")
    if mask:
        whole = (2, heads, q_len, kv_len)
        shape = {
            "own": whole, "double": whole, "queries": (q_len, 1), "keys": (2, 1, 1, kv_len), "head": (heads, 1, 1),
            "batch": (2, 1, q_len, kv_len), "one": (1,),
        }  # fmt: skip
        numbers = normal(*shape.get(mask, (heads, q_len, kv_len)), seed=9)
        t["attn_mask"] = numbers > -1 if mask == "bool" else numbers.to(torch.float64 if mask == "double" else dtype)
        if mask != "bool":
            grads.append("dattn_mask")
    if dlse:
        t["dlse"] = normal(2, heads, q_len)
    if blocks:
        t["block_mask"] = normal(1, heads, -(-q_len // blocks[0]), -(-kv_len // blocks[1]), seed=5) > -0.5
    if lengths:
        t |= {"q_lengths": torch.tensor([q_len, q_len // 2]), "kv_lengths": torch.tensor([kv_len // 3, kv_len])}
    check(
        t, causal=causal, window=window, causal_alignment="top_left" if top_left else "bottom_right", scale=scale,
        softcap=softcap, layout=layout, dropout_p=dropout_p, dropout_seed=(1 << 63) + 5 if dropout_p else None,
        grads=grads, block_size=blocks or (128, 128),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_instruction_set_is_exact(level: str, dtype: torch.dtype) -> None:
    for dim, value_dim in ((64, 64), (40, 24), (128, 112)):
        t = qkv(2, 4, 130, 200, dim, kv_heads=2, value_dim=value_dim, dtype=dtype)
        check(t | {"alibi_slopes": normal(4).abs() / 64}, causal=True, window=(70, -1))
        check(t | {"sinks": normal(4)}, softcap=4.0, dropout_p=0.2, dropout_seed=3, grads=[*GRADS, "dsinks"])
        mask = normal(2, 4, 130, 200, dtype=dtype)
        check(t | {"attn_mask": mask}, causal=True, grads=["dattn_mask"])


@pytest.mark.parametrize("shape", [(2, 4, 500, 300), (4, 500, 300), (500, 300), (2, 1, 1, 300), (4, 500, 1)], ids=str)
def test_the_gradient_of_a_shared_mask_has_the_same_bits_on_any_number_of_threads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_ROWS", 128)
    monkeypatch.setattr(parts, "_LEAST_FLOPS", 1)
    t = qkv(2, 4, 500, 300, 16, kv_heads=2) | {"attn_mask": normal(*shape)}
    check(t, grads=[*GRADS, "dattn_mask"], causal=True)
    t |= forward("torch", t, causal=True)
    results = []
    for threads in (1, 2, 3, 5, 16):
        problem = Problem.create(t, Options(causal=True, grads=[*GRADS, "dattn_mask"]), "backward")
        differentiate(problem, threads)
        results.append(problem.outputs)
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in other)
    if shape[0] != 2:  # sequences share it
        separate = [
            backward("torch", {n: x if n == "attn_mask" else x[b : b + 1] for n, x in t.items()}, causal=True,
                     grads=["dattn_mask"])["dattn_mask"]
            for b in range(2)
        ]  # fmt: skip
        assert torch.equal(separate[0] + separate[1], results[0]["dattn_mask"])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (700, 90)}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_parts_of_a_sequence_agree_with_float64_and_have_the_same_bits_on_any_number_of_threads(
    options: dict[str, Any], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_ROWS", 128)
    monkeypatch.setattr(parts, "_LEAST_FLOPS", 1)
    if "dropout_p" in options:
        options = options | {"dropout_seed": 11}
    t = qkv(2, 2, 900, 700, 32, kv_heads=kv_heads) | {"sinks": normal(2)}
    check(t, **options, grads=[*GRADS, "dsinks"])
    t |= forward("torch", t, **options)
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
    t |= forward("torch", t, **{name: value for name, value in options.items() if name != "grads"})
    whole = backward("torch", t, **options)
    problem = Problem.create(t, Options(**options), "backward")
    for b in range(3):
        for head in range(2):
            part = problem.of_rows(b, b + 1).heads(head, head + 1)
            run_part(part, "torch")
    assert all(torch.equal(problem.outputs[name], whole[name]) for name in whole)


def test_strided_and_packed_tensors_have_the_same_bits() -> None:
    t = qkv(2, 4, 90, 90, 32, kv_heads=2)
    t |= forward("torch", t, causal=True)
    expected = backward("torch", t, causal=True)
    transposed = {n: x if n == "lse" else x.transpose(1, 2) for n, x in t.items()}
    strided = backward("torch", {n: x if n == "lse" else x.contiguous() for n, x in transposed.items()}, causal=True,
                       layout="bshd")  # fmt: skip
    packed = {n: x.transpose(0, 1).reshape(4, -1) if n == "lse" else x.flatten(0, 1) for n, x in transposed.items()}
    edges = {f"cu_seqlens_{name}": torch.tensor([0, 90, 180]) for name in "qk"}
    ragged = backward("torch", packed | edges, causal=True, layout="thd")
    columns = {n: x if n == "lse" else x.mT.contiguous().mT for n, x in t.items()}  # rows with strides
    for name, grad in expected.items():
        assert torch.equal(strided[name].transpose(1, 2), grad)
        assert torch.equal(ragged[name].view(2, 90, *grad.shape[1::2]).transpose(1, 2), grad)
        assert torch.equal(backward("torch", columns, causal=True)[name], grad)


def test_only_what_is_asked_for_is_computed() -> None:
    t = qkv(1, 2, 70, 90, 16) | {"attn_mask": normal(1, 2, 70, 90)}
    t |= forward("torch", t)
    every = backward("torch", t, grads=[*GRADS, "dattn_mask"])
    for name, grad in every.items():
        (alone,) = attention_backward(**t, grads=[name], backend="torch")
        assert torch.equal(alone, grad)


def test_plain_calls_and_the_general_path_have_the_same_bits() -> None:
    for layout in ("bhsd", "bshd"):
        leaves = {n: x.requires_grad_() for n, x in qkv(1, 3, 70, 70, 48).items() if n != "do"}
        o, lse = attention(**leaves, layout=layout, return_lse=True)
        plain = torch.autograd.grad(o.square().sum(), list(leaves.values()), retain_graph=True)
        t = {n: x.detach() for n, x in leaves.items()} | {"o": o.detach(), "lse": lse.detach()}
        general = attention_backward(2 * t["o"], **t, layout=layout)
        assert all(torch.equal(one, other) for one, other in zip(plain, general, strict=True))


def test_an_lse_of_other_numbers_gives_infinities_rather_than_garbage() -> None:
    t = qkv(1, 1, 3, 5, 16)
    t |= {"o": torch.zeros(1, 1, 3, 16), "lse": torch.full((1, 1, 3), -1000.0)}
    problem = Problem.create(t, Options(backend="torch"), "backward")
    run([problem], "torch")
    assert not problem.outputs["dv"].isfinite().any()


def test_keys_that_no_query_sees_are_not_read() -> None:
    t = qkv(1, 2, 64, 700, 32)
    t |= forward("torch", t, causal=True, window=(100, 0))
    expected = backward("torch", t, causal=True, window=(100, 0))
    for name in "kv":
        t[name][:, :, :400] = torch.nan
    actual = backward("torch", t, causal=True, window=(100, 0))
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())
    assert not actual["dk"][:, :, :400].any()
