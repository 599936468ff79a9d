"""Problems too large for the interpreter have right answers on a GPU (`make gpu`), and repeats have the same bits."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Problem, run, verify
from tests.conftest import INTERPRETING
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device")]

CASES: list[dict[str, Any]] = [
    PLAIN | {"dtype": dtype, "band": band, "group": group, "dims": (dim, dim)}
    for dtype, dim in (("bfloat16", 64), ("bfloat16", 128), ("float16", 96), ("bfloat16", 256), ("float32", 64))
    for band, group in (("full", 1), ("causal", 4))
]
CASES += [
    PLAIN | {"dtype": "bfloat16", "dims": (128, 128), "band": "causal", "layout": "thd", "group": 2},
    PLAIN | {"dtype": "bfloat16", "dims": (128, 128), "band": "window", "softcap": 3.0, "sinks": True},
    PLAIN | {"dtype": "bfloat16", "dims": (64, 64), "mask": "full", "alibi": True, "dropout": True, "dlse": True},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1023, 1024), (2048, 2048), (5, 4099)])
def test_real_sizes(case: dict[str, Any], q_len: int, kv_len: int) -> None:
    report = verify(tensors_of(case, q_len, kv_len), options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def test_fifty_repeats_are_the_same_bits() -> None:
    case = PLAIN | {"dtype": "bfloat16", "band": "causal", "group": 4, "dims": (128, 128)}
    tensors, options = tensors_of(case, 2048, 2048), options_of(case)
    problem = Problem.create(tensors, options, "backward")
    run([problem], "triton")
    first = {name: t.clone() for name, t in problem.outputs.items()}
    for _ in range(50):
        run([problem], "triton")
        assert all(torch.equal(t, first[name]) for name, t in problem.outputs.items())
