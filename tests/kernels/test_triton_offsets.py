"""Offsets above 2^31 elements work: rows are so far apart that 32-bit index arithmetic would wrap."""

import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.triton_backend.host import launch
from tests.conftest import DEVICE


# The last row lies after element 2^32; only touched pages are resident. The forward copies keys that are 2^23 apart.
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
