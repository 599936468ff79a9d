"""With FLASHPOINT_STORE_DS, gradients for Hopper store dS and are right; a sequence's bits depend on it alone.

All new memory is filled with NaN, so that a tile of dS that nothing has stored shows in the answer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, verify
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import stored
from flashpoint_kernels.triton_backend.host.launch import backward_calls
from tests.support.kernels.hopper import (
    HALF,
    ON_SM_90,
    answers,
    assert_equal,
    assert_keys_beyond_the_last_add_nothing,
    backward_kernels,
)
from tests.support.kernels.solving import qkv
from tests.support.kernels.triton_cases import options_of, tensors_of

pytestmark = [ON_SM_90, pytest.mark.usefixtures("stores_ds")]

OF_STORED = ["attention_delta", "attention_backward_kv_hopper", "attention_backward_q_stored_hopper"]
OF_WIDE = [
    "attention_delta", "attention_backward_v_hopper", "attention_backward_k_stored_hopper",
    "attention_backward_q_stored_hopper",
]  # fmt: skip
TWICE = ["attention_delta", "attention_backward_kv_hopper", "attention_backward_q_hopper"]
CASES = [
    (HALF | {"band": "causal", "group": 2}, 70, 130, OF_STORED),
    (HALF | {"dims": (64, 64), "dtype": "bfloat16"}, 256, 128, OF_STORED),  # only whole tiles
    (HALF | {"band": "top_left", "layout": "bshd", "dims": (24, 40), "dlse": True}, 257, 45, OF_STORED),
    (HALF | {"band": "causal", "dims": (128, 64), "dtype": "bfloat16"}, 65, 129, OF_STORED),
    (HALF | {"band": "causal", "lengths": True, "dims": (16, 128)}, 140, 99, OF_STORED),
    (HALF | {"band": "causal", "dims": (160, 256)}, 70, 130, OF_WIDE),
    (HALF | {"dims": (256, 24), "group": 2, "layout": "bshd", "dtype": "bfloat16"}, 129, 70, OF_WIDE),
]
FAST = (0,)


@pytest.mark.parametrize(
    ("case", "q_len", "kv_len", "kernels"),
    [pytest.param(*case, marks=[] if n in FAST else pytest.mark.slow) for n, case in enumerate(CASES)],
)
def test_answers(case: dict[str, Any], q_len: int, kv_len: int, kernels: list[str]) -> None:
    tensors = tensors_of(case, q_len, kv_len)
    assert backward_kernels(tensors, options_of(case)) == kernels
    report = verify(tensors, options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def launched(dims: tuple[int, int]) -> list[Problem]:
    """Return gradients of problems with different heads and lengths, which share a launch."""
    return [
        Problem.create(
            qkv(batch, heads * group, q_len, kv_len, dims[0], kv_heads=heads, value_dim=dims[1],
                dtype=torch.float16, seed=seed),
            Options(causal=causal), "backward",
        )
        for seed, (batch, heads, group, q_len, kv_len, causal) in enumerate(
            [(1, 1, 2, 129, 60, True), (2, 2, 1, 70, 130, False), (1, 1, 1, 100, 0, True)]
        )
    ]  # fmt: skip


@pytest.mark.parametrize("dims", [(16, 16), pytest.param((136, 32), marks=pytest.mark.slow)])
def test_bits_depend_on_neither_neighbours_nor_chunks(dims: tuple[int, int]) -> None:
    """A workspace of 1 byte gives each key head a chunk; of 384 KiB, a chunk has several; the default has one chunk."""
    problems = launched(dims)
    alone = [answers([problem])[0] for problem in problems]
    launches = []
    for order, workspace in (([0, 1, 2], None), ([2, 1, 0], 1), ([1, 2, 0], 3 << 17)):
        for actual, expected in zip(answers(problems, order, workspace), alone, strict=True):
            assert_equal(actual, expected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLASHPOINT_WORKSPACE_BYTES", str(workspace or 1 << 30))
            calls = backward_calls(with_forwards(problems)[1], [{}] * len(problems))
            launches.append([call.kernel.__name__ for call in calls if call.programs].count(OF_STORED[-1]))
    assert launches == [1, 6, 2]


@pytest.mark.slow
def test_sequences_of_one_launch_take_their_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with few queries has packed blocks; one whose dS exceeds the constant computes its scores twice.

    Which of them has stored dS depends on the sequence alone, and so do its bits.
    """
    monkeypatch.setattr(stored, "MOST", 2 * 256 * 256)  # of 256 queries and 256 keys
    q, k = [70, 3, 260, 0], [130, 40, 129, 5]
    tensors = {name: t[0].transpose(0, 1) for name, t in qkv(1, 2, sum(q), sum(k), 16, dtype=torch.float16).items()}
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    tensors |= {"cu_seqlens_q": torch.tensor([0, *q]).cumsum(0), "cu_seqlens_k": torch.tensor([0, *k]).cumsum(0)}
    options = Options(layout="thd", causal=True)
    kernels = backward_kernels(tensors, options)
    assert kernels == [*OF_STORED, *TWICE[1:], "attention_backward_q"]
    (whole,) = answers([Problem.create(tensors, options, "backward")])
    assert verify(tensors, options, answers=whole).ok
    for n in range(len(q)):
        rows = {name: slice(sum(each[:n]), sum(each[: n + 1])) for name, each in (("q", q), ("k", k))}
        own = {name: tensors[name][rows["k" if name in "kv" else "q"]] for name in ("q", "k", "v", "do")}
        own |= {f"cu_seqlens_{name}": torch.tensor([0, each[n]]) for name, each in (("q", q), ("k", k))}
        (alone,) = answers([Problem.create(own, options, "backward")])
        assert_equal(alone, {name: t[rows["q" if name == "dq" else "k"]] for name, t in whole.items()})


@pytest.mark.parametrize("dims", [pytest.param((16, 16), marks=pytest.mark.slow), (136, 32)])
def test_a_gradient_has_the_same_bits_whichever_others_are_requested(dims: tuple[int, int]) -> None:
    tensors = qkv(1, 2, 70, 130, dims[0], kv_heads=1, value_dim=dims[1], dtype=torch.float16)
    (whole,) = answers([Problem.create(tensors, Options(causal=True), "backward")])
    for name in ("dq", "dk", "dv"):
        options = Options(causal=True, grads=(name,))
        (single,) = answers([Problem.create(tensors, options, "backward")])
        assert list(single) == [name]
        assert_equal(single, whole)
        assert ("attention_backward_q_stored_hopper" in backward_kernels(tensors, options)) == (name == "dq")


def test_it_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(HALF, 70, 70)
    wide = tensors_of(HALF | {"dims": (160, 16)}, 70, 70)
    general = ["attention_delta", "attention_backward_kv", "attention_backward_q"]
    for value in ("", "0", "false"):
        monkeypatch.setenv("FLASHPOINT_STORE_DS", value)
        assert backward_kernels(tensors, Options()) == TWICE
        assert backward_kernels(wide, Options()) == general
    monkeypatch.delenv("FLASHPOINT_STORE_DS")
    assert backward_kernels(tensors, Options()) == TWICE
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "true")
    assert backward_kernels(tensors, Options()) == OF_STORED
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "perhaps")
    with pytest.raises(ValueError, match="FLASHPOINT_STORE_DS must be 0 or 1, not 'perhaps'"):
        backward_kernels(tensors, Options())


@pytest.mark.parametrize("dim", [16, pytest.param(136, marks=pytest.mark.slow)])
def test_keys_beyond_the_last_add_nothing_to_dq(dim: int) -> None:
    assert_keys_beyond_the_last_add_nothing(dim)
