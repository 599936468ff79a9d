"""Keys far apart in memory give the same bits as adjacent keys; the bits of a head do not depend on other heads."""

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.triton_backend.host import launch
from tests.conftest import DEVICE
from tests.support.kernels.solving import qkv


# The last row begins after element 2^32; only touched pages of memory are resident. The forward makes a copy of keys
# that are 2^23 or more elements apart (`table.FARTHEST`), as in the first case.
@pytest.mark.parametrize(("rows", "apart"), [(70, 1 << 26), (1100, 1 << 22)])
def test_rows_4_gib_elements_apart(rows: int, apart: int) -> None:
    dim = 16
    storage = torch.empty((rows - 1) * apart + dim, dtype=torch.float16, device=DEVICE)
    k = torch.as_strided(storage, (1, 1, rows, dim), (0, 0, apart, 1))
    g = torch.Generator().manual_seed(0)
    near = {
        name: torch.randn((1, 1, n, dim), generator=g).half().to(DEVICE)
        for name, n in (("q", 9), ("k", rows), ("v", rows), ("do", 9))
    }
    k.copy_(near["k"])
    answers = []
    for key in (near["k"], k):
        tensors = {"q": near["q"], "k": key, "v": near["v"]}
        forward = Problem.create(tensors, Options(return_lse=True, causal=True))
        launch.forward([forward])
        backward = Problem.create({**tensors, **forward.outputs, "do": near["do"]}, Options(causal=True), "backward")
        launch.backward([backward])
        answers.append({**forward.outputs, **backward.outputs})
    assert all(torch.equal(answers[0][name], answers[1][name]) for name in answers[0])
    assert not any(t.isnan().any() for t in answers[1].values())


def test_each_head_has_the_bits_that_it_has_in_a_group_of_any_neighbours() -> None:
    """A head's answer does not depend on the other heads of its group, whose rows are in the same block."""
    t = qkv(1, 8, 2, 70, 16, kv_heads=1)
    other = t | {"q": t["q"].clone()}
    other["q"][:, 1:] = 100.0
    answers = []
    for tensors in (t, other):
        problem = Problem.create({name: tensors[name] for name in "qkv"}, Options(return_lse=True))
        run([problem], "triton")
        answers.append({name: x[:, :1].clone() for name, x in problem.outputs.items()})
    assert all(torch.equal(answers[0][name], answers[1][name]) for name in answers[0])
    assert answers[0]["o"].device.type == DEVICE
