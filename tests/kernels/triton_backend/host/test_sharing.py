"""A program reads a page for all sequences that share it, in one problem and in several problems of a launch."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.triton_backend.host import launch
from tests.conftest import INTERPRETING
from tests.support.kernels.shared_pages import tree
from tests.support.kernels.solving import normal


def forks(lengths: list[int], *, fixed: bool = True, group: int = 1, **options: Any) -> Problem:
    """Return a problem of sequences with these lengths, whose first 128 keys are in the same pages of 16 keys."""
    table, kv_lengths, count = tree(
        [0, *[128] * (len(lengths) - 1)], [n - 128 * (i > 0) for i, n in enumerate(lengths)], 16, 1
    )
    q = normal(len(lengths), 2 * group, 1, 32, seed=1)
    k, v = (normal(count, 2, 16, 32, seed=n) for n in (2, 3))
    tensors = {"q": q, "k": k, "v": v, "block_table": table, "kv_lengths": kv_lengths}
    return Problem.create(tensors, Options(causal=True, **options), fixed_pages=fixed)


def programs(problems: list[Problem]) -> dict[str, int]:
    """Return the number of programs of each kernel."""
    return {call.kernel.__name__: call.programs for call in launch.forward_calls(problems) if call.programs}


@pytest.mark.skipif(not INTERPRETING, reason="the sizes are those of the interpreter's tiles")
def test_a_triton_program_reads_a_shared_part_for_all_sequences() -> None:
    lengths = [150, 140, 150, 131]  # each has two parts of 64 keys and a rest, for two key heads
    assert programs([forks(lengths)]) == {"attention_cascade": 2 * 2, "attention_forward": 4 * 2, "merge_parts": 4 * 2}
    assert programs([forks(lengths, fixed=False)])["attention_forward"] == 4 * 3 * 2
    # 16 rows of a block hold four sequences of four heads; six sequences take two programs
    grouped = programs([forks([150] * 6, group=4)])
    assert grouped["attention_cascade"] == 2 * 2 * 2
    # no keys are shared if the queries of one sequence fill over half a block, or if the window hides the first keys
    assert "attention_cascade" not in programs([forks(lengths, group=9)])
    assert "attention_cascade" not in programs([forks(lengths, window=(60, 0))])


@pytest.mark.skipif(not INTERPRETING, reason="the sizes are those of the interpreter's tiles")
def test_triton_shares_between_the_problems_of_a_launch() -> None:
    first = forks([150, 140])
    pool = {name: first.tensors[name] for name in "kv"}
    of_other = {"q": normal(1, 2, 1, 32, seed=9), "block_table": first.tensors["block_table"][1:]}
    other = Problem.create(
        pool | of_other | {"kv_lengths": torch.tensor([140])}, Options(causal=True), fixed_pages=True
    )
    assert programs([first, other])["attention_cascade"] == 2 * 2
    alone = [Problem.create(p.tensors, p.spec.options, fixed_pages=True) for p in (first, other)]
    run([first, other], "triton")
    for problem, same in zip((first, other), alone, strict=True):
        run([same], "triton")
        assert torch.equal(problem.outputs["o"], same.outputs["o"])
    # sequences share no reads with sequences of another pool or scale
    assert programs([first, forks([150, 140])])["attention_cascade"] == 2 * 2 * 2
    assert programs([forks([150]), forks([150], scale=0.5)]).keys() == {"attention_forward", "merge_parts"}
