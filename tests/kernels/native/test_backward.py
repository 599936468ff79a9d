"""The gradient in C is exact for each option, instruction set and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, Problem, run
from tests.support.kernels.solving import backward, check, forward, normal, qkv

GRADS = ("dq", "dk", "dv")


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
        "torch", t, causal=causal, window=window, causal_alignment="top_left" if top_left else "bottom_right",
        scale=scale, softcap=softcap, layout=layout, dropout_p=dropout_p,
        dropout_seed=(1 << 63) + 5 if dropout_p else None, grads=grads, block_size=blocks or (128, 128),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_instruction_set_is_exact(level: str, dtype: torch.dtype) -> None:
    for dim, value_dim in ((64, 64), (40, 24), (128, 112)):
        t = qkv(2, 4, 130, 200, dim, kv_heads=2, value_dim=value_dim, dtype=dtype)
        check("torch", t | {"alibi_slopes": normal(4).abs() / 64}, causal=True, window=(70, -1))
        check("torch", t | {"sinks": normal(4)}, softcap=4.0, dropout_p=0.2, dropout_seed=3, grads=[*GRADS, "dsinks"])
        mask = normal(2, 4, 130, 200, dtype=dtype)
        check("torch", t | {"attn_mask": mask}, causal=True, grads=["dattn_mask"])


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
