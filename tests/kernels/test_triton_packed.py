"""Packed blocks, tiles with the few queries of all heads that share a key head, are right in the forward and dQ."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.triton_backend.host import launch
from tests.conftest import INTERPRETING
from tests.support.kernels.solving import qkv
from tests.support.kernels.triton_cases import FACTORS, PLAIN, name_of, options_of, pairs, tensors_of

FEW = 3  # queries, so few that blocks are packed in the interpreter and on a GPU
SINGLES = [PLAIN | {"group": 2, name: level} for name, levels in FACTORS.items() for level in levels]


def kernels_of(problem: Problem) -> set[tuple[str, bool]]:
    """Return (kernel, whether its blocks are packed) for each call that launches a program."""
    forward = problem.spec.direction == "forward"
    calls = launch.forward_calls([problem]) if forward else launch.backward_calls([problem], [{}])
    return {(call.kernel.__name__, bool(call.constants.PACKED)) for call in calls if call.programs}


def check(case: dict[str, Any], q_len: int, kv_len: int, **more: Any) -> None:
    one = INTERPRETING and not case["mask"] and not case["lengths"]  # one sequence, because the interpreter is slow
    report = verify(tensors_of(case, q_len, kv_len, batch=1 if one else 2), options_of(case, **more))
    assert report.backend == "triton"
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def singles() -> Iterator[Any]:
    fast = ("dtype", "band", "softcap", "alibi", "dropout")
    for case in SINGLES:
        if case["layout"] != "thd":
            quick = sum(case[name] != PLAIN[name] for name in fast) == 1 and case["band"] in ("full", "causal")
            yield pytest.param(case, marks=[] if quick else pytest.mark.slow, id=name_of(case))


@pytest.mark.parametrize("case", [*singles()])
def test_each_option_alone(case: dict[str, Any]) -> None:
    check(case, FEW, 70)


# Only in `make test-full`, because test_triton_options.py tests every pair of options with these kernels.
@pytest.mark.full
@pytest.mark.parametrize("case", pairs(), ids=name_of)
def test_every_pair_of_options(case: dict[str, Any]) -> None:
    check(case, FEW, 70)


@pytest.mark.parametrize("band", ["causal", pytest.param("window", marks=pytest.mark.slow)])
def test_sequences_with_few_and_with_many_queries_in_one_request(band: str) -> None:
    case = PLAIN | {"layout": "thd", "band": band, "group": 2}
    tensors = tensors_of(case, 40, 90)
    tensors["cu_seqlens_q"], tensors["cu_seqlens_k"] = torch.tensor([0, 2, 39, 40]), torch.tensor([0, 30, 60, 90])
    report = verify(tensors, options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.slow
@pytest.mark.parametrize(("q_len", "group"), [(1, 1), (1, 8), (2, 16), (8, 3), (8, 9)])
def test_any_group_and_keys_in_many_parts(q_len: int, group: int) -> None:
    """Groups of any size, in one or several blocks, are right if the keys are split into parts and merged."""
    tensors = qkv(1, 2 * group, q_len, 300, 16, kv_heads=2)
    report = verify(tensors, Options(backend="triton", causal=True))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def test_few_queries_take_packed_blocks_and_many_do_not() -> None:
    t = qkv(1, 4, FEW, 20, 16, kv_heads=2)
    forward = {name: t[name] for name in "qkv"}
    assert kernels_of(Problem.create(forward, Options())) == {("attention_forward", True)}
    assert ("attention_backward_q", True) in kernels_of(with_answers(t))
    long = qkv(1, 4, 100, 20, 16, kv_heads=2)
    assert kernels_of(Problem.create({name: long[name] for name in "qkv"}, Options())) == {("attention_forward", False)}
    assert ("attention_backward_q", False) in kernels_of(with_answers(long))


def with_answers(t: dict[str, torch.Tensor]) -> Problem:
    """Return a gradient problem that contains the answers of its forward."""
    forward = Problem.create({name: t[name] for name in "qkv"}, Options(return_lse=True))
    run([forward], "triton")
    return Problem.create(t | forward.outputs, Options(), "backward")
