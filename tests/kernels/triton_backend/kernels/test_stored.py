"""With FLASHPOINT_STORE_DS, the general kernels store dS and are right; a sequence's bits depend on it alone.

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
from tests.conftest import INTERPRETING
from tests.support.kernels.hopper import (
    answers,
    assert_equal,
    assert_keys_beyond_the_last_add_nothing,
    backward_kernels,
)
from tests.support.kernels.solving import qkv
from tests.support.kernels.triton_cases import PLAIN, options_of, tensors_of

pytestmark = pytest.mark.usefixtures("stores_ds_in_general")

DIM = 16 if INTERPRETING else 128  # a GPU stores dS only for wide heads
ODD = (24, 40) if INTERPRETING else (96, 160)
HALF = PLAIN | {"dtype": "float16", "dims": (DIM, DIM)}
OF_STORED = ["attention_delta", "attention_backward_kv", "attention_backward_q_stored"]
TWICE = ["attention_delta", "attention_backward_kv", "attention_backward_q"]
CASES = [
    (HALF | {"band": "causal", "group": 2}, 70, 130),
    (HALF | {"dims": (128, 64), "dtype": "bfloat16"}, 256, 128),  # only whole tiles
    (HALF | {"band": "top_left", "layout": "bshd", "dims": ODD, "dlse": True}, 257, 45),
    (HALF | {"band": "causal", "lengths": True, "dims": (16, 136), "dtype": "bfloat16"}, 140, 99),
    (HALF | {"band": "causal", "dims": (200, 24), "layout": "thd"}, 129, 200),
]


@pytest.mark.parametrize(
    ("case", "q_len", "kv_len"),
    [pytest.param(*case, marks=[] if n < 3 else pytest.mark.slow) for n, case in enumerate(CASES)],
)
def test_answers(case: dict[str, Any], q_len: int, kv_len: int) -> None:
    tensors = tensors_of(case, q_len, kv_len)
    assert "attention_backward_q_stored" in backward_kernels(tensors, options_of(case))
    report = verify(tensors, options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def test_rows_that_begin_anywhere_in_memory() -> None:
    """Their addresses are no multiples of 16 bytes."""
    tensors = tensors_of(HALF | {"band": "causal", "dims": ODD}, 70, 130)
    for name in ("q", "k", "v", "do"):
        t = tensors[name]
        shifted = t.new_empty(t.numel() + 1)[1:].view(t.shape)
        tensors[name] = shifted.copy_(t)
    assert backward_kernels(tensors, Options(causal=True)) == OF_STORED
    assert verify(tensors, Options(causal=True, backend="triton")).ok


def launched() -> list[Problem]:
    """Return gradients of problems with different heads and lengths, which share a launch."""
    return [
        Problem.create(
            qkv(batch, heads * group, q_len, kv_len, DIM, kv_heads=heads, dtype=torch.float16, seed=seed),
            Options(causal=causal), "backward",
        )
        for seed, (batch, heads, group, q_len, kv_len, causal) in enumerate(
            [(1, 1, 2, 129, 60, True), (2, 2, 1, 70, 130, False), (1, 1, 1, 100, 0, True)]
        )
    ]  # fmt: skip


def test_bits_depend_on_neither_neighbours_nor_chunks() -> None:
    """A workspace of 1 byte gives each key head a chunk; of 384 KiB, a chunk has several; the default has one chunk."""
    problems = launched()
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


def test_sequences_of_one_launch_take_their_own_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with few queries has packed blocks; one whose dS exceeds the constant computes its scores twice.

    Which of them has stored dS depends on the sequence alone, and so do its bits.
    """
    monkeypatch.setattr(stored, "MOST", 2 * 256 * 256)  # of 256 queries and 256 keys
    q, k = [70, 3, 260, 0], [130, 40, 129, 5]
    tensors = {name: t[0].transpose(0, 1) for name, t in qkv(1, 2, sum(q), sum(k), DIM, dtype=torch.float16).items()}
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    tensors |= {"cu_seqlens_q": torch.tensor([0, *q]).cumsum(0), "cu_seqlens_k": torch.tensor([0, *k]).cumsum(0)}
    options = Options(layout="thd", causal=True)
    assert backward_kernels(tensors, options) == [*OF_STORED, *TWICE[1:], "attention_backward_q"]
    (whole,) = answers([Problem.create(tensors, options, "backward")])
    assert verify(tensors, options, answers=whole).ok
    for n in range(len(q)):
        rows = {name: slice(sum(each[:n]), sum(each[: n + 1])) for name, each in (("q", q), ("k", k))}
        own = {name: tensors[name][rows["k" if name in "kv" else "q"]] for name in ("q", "k", "v", "do")}
        own |= {f"cu_seqlens_{name}": torch.tensor([0, each[n]]) for name, each in (("q", q), ("k", k))}
        (alone,) = answers([Problem.create(own, options, "backward")])
        assert_equal(alone, {name: t[rows["q" if name == "dq" else "k"]] for name, t in whole.items()})


def test_a_gradient_has_the_same_bits_whichever_others_are_requested() -> None:
    tensors = qkv(1, 2, 70, 130, DIM, kv_heads=1, dtype=torch.float16)
    (whole,) = answers([Problem.create(tensors, Options(causal=True), "backward")])
    for name in ("dq", "dk", "dv"):
        options = Options(causal=True, grads=(name,))
        (single,) = answers([Problem.create(tensors, options, "backward")])
        assert list(single) == [name]
        assert_equal(single, whole)
        assert ("attention_backward_q_stored" in backward_kernels(tensors, options)) == (name == "dq")


def test_other_problems_and_a_switch_that_is_off_take_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(HALF, 70, 70)
    assert backward_kernels(tensors, Options()) == OF_STORED
    assert backward_kernels(tensors, Options(window=(9, 9))) == TWICE
    assert backward_kernels({name: t.float() for name, t in tensors.items()}, Options()) == TWICE
    assert backward_kernels(tensors_of(HALF | {"dims": (264, 16)}, 70, 70), Options()) == TWICE
    blocks = HALF | {"blocks": "own"}
    assert OF_STORED[-1] not in backward_kernels(tensors_of(blocks, 70, 70), options_of(blocks))
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "0")
    assert backward_kernels(tensors, Options()) == TWICE


def test_keys_beyond_the_last_add_nothing_to_dq() -> None:
    assert_keys_beyond_the_last_add_nothing(DIM)
