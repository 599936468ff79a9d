"""Every option in the Triton kernels, alone and in pairs, forward and backward, is right by `verify`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, verify
from tests.conftest import DEVICE, INTERPRETING
from tests.support.kernels.triton_cases import FACTORS, PLAIN, check, name_of, pairs, tensors_of

SINGLES = [PLAIN | {name: level} for name, levels in FACTORS.items() for level in levels[1:]]
# These are marked slow, because other cases run the same kernel code.
REPEATED = ({"mask": "heads"}, {"dims": (64, 64)})
# Interpreted tests of these options use one sequence: the kernel code for batch strides is the same with all of them.
ONE_SEQUENCE = ("dtype", "band", "softcap", "alibi", "sinks", "dropout", "group", "dims")
HEAD_DIMS = [(1, 1), (3, 256), (32, 32), (59, 59), (96, 96), (111, 64), (160, 160)]
HEAD_DIMS += [(192, 128), (224, 224), (256, 256)]
# (Sq, Sk): one row, one key, primes and edges of tiles. The last two end in the same tiles as (113, 203), so only the
# wide sweep runs them.
SHAPES = [(1, 1), (3, 3), (64, 1), (239, 1), (1, 239), (113, 203), (128, 217), (113, 211), (108, 200)]


def singles() -> Iterator[Any]:
    for case in (PLAIN, *SINGLES):
        if case["layout"] != "thd":
            slow = any(case == PLAIN | level for level in REPEATED)
            yield pytest.param(case, marks=[pytest.mark.slow] if slow else [], id=name_of(case))


@pytest.mark.parametrize("case", [*singles()])
def test_each_option_alone(case: dict[str, Any]) -> None:
    """Each option alone is right; in the interpreter, queries and keys take more than one step of each loop."""
    one = any(case[name] != PLAIN[name] for name in ONE_SEQUENCE)
    check(case, *((37, 70) if INTERPRETING else (70, 90)), batch=1 if one else 2)


@pytest.mark.parametrize(
    "band",
    [band if band in ("full", "causal") else pytest.param(band, marks=pytest.mark.slow) for band in FACTORS["band"]],
)
def test_ragged(band: str) -> None:
    check(PLAIN | {"layout": "thd", "band": band}, 70, 90)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairs(), ids=name_of)
def test_every_pair_of_options(case: dict[str, Any]) -> None:
    check(case, 37, 70, batch=2 if case["lengths"] else 1)


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [shape if shape in ((1, 1), (113, 203)) else pytest.param(*shape, marks=pytest.mark.slow) for shape in SHAPES[:-2]],
)
def test_lengths(q_len: int, kv_len: int) -> None:
    check(PLAIN | {"band": "causal", "group": 2}, q_len, kv_len, batch=1)


# Fast: a padded head dimension and the largest. Slow: these in each dtype, and all in float32. Wide sweep: the others.
WIDTHS = [
    pytest.param(
        dtype, dim,
        marks=[] if (dtype, dim) in (("float32", 40), ("bfloat16", 128))
        else pytest.mark.slow if dtype == "float32" or dim in (40, 128)
        else pytest.mark.full,
    )
    for dtype in FACTORS["dtype"]
    for dim in (16, 40, 64, 80, 128)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "dim"), WIDTHS)
def test_head_dimensions(dtype: str, dim: int) -> None:
    check(PLAIN | {"dtype": dtype, "dims": (dim, dim)}, 33, 70, batch=1)


@pytest.mark.full
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("band", FACTORS["band"])
def test_every_head_dimension(dims: tuple[int, int], dtype: str, band: str) -> None:
    check(PLAIN | {"dtype": dtype, "dims": dims, "band": band, "group": 2}, 70, 90)


@pytest.mark.full
@pytest.mark.parametrize(("q_len", "kv_len"), [*SHAPES, (799, 3), (239, 239), (200, 600)])
@pytest.mark.parametrize("case", [PLAIN, *SINGLES], ids=name_of)
def test_every_option_at_every_length(case: dict[str, Any], q_len: int, kv_len: int) -> None:
    check(case, q_len, kv_len)


def test_strided_unaligned_and_expanded_inputs() -> None:
    case = PLAIN | {"band": "causal"}
    packed = tensors_of(case, 40, 40)
    wide = {name: torch.randn((2, 2, 40, 35), generator=torch.Generator().manual_seed(n)).to(DEVICE)
            for n, name in enumerate(("q", "k", "v", "do"))}  # fmt: skip
    views = {name: t[..., 3:19] for name, t in wide.items()}  # neither aligned nor contiguous
    views["k"] = packed["k"].transpose(-1, -2).contiguous().transpose(-1, -2)  # the last stride is not 1
    views["v"] = packed["v"][:, :1].expand(2, 2, 40, 16)  # one head for all: stride 0
    report = verify(views, Options(causal=True, backend="triton"))
    assert report.ok, report
