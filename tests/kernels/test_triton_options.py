"""Every option in the Triton kernels, alone and in pairs, forward and backward, is right by `verify`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, run, verify
from tests.conftest import DEVICE, INTERPRETING
from tests.support.kernels.triton_cases import FACTORS, PLAIN, name_of, options_of, pairs, tensors_of

SINGLES = [PLAIN | {name: level} for name, levels in FACTORS.items() for level in levels[1:]]
# Other cases run the same kernel code.
REPEATED = ({"mask": "heads"}, {"dims": (64, 64)})
# With these the interpreter takes one sequence: the kernel code for the batch strides is the same for all of them.
ONE_SEQUENCE = ("dtype", "band", "softcap", "alibi", "sinks", "dropout", "group", "dims")
HEAD_DIMS = [(1, 1), (3, 256), (32, 32), (59, 59), (96, 96), (111, 64), (160, 160)]
HEAD_DIMS += [(192, 128), (224, 224), (256, 256)]
# (Sq, Sk) of the reference page up to 239: one row, one key, primes, tile edges. The last two end inside the same tiles
# as (113, 203) does.
SHAPES = [(1, 1), (3, 3), (64, 1), (239, 1), (1, 239), (113, 203), (128, 217), (113, 211), (108, 200)]


def check(case: dict[str, Any], q_len: int, kv_len: int, *, batch: int = 2, **more: Any) -> None:
    """Assert right answers. The interpreter takes `batch` sequences; a GPU always takes two."""
    report = verify(tensors_of(case, q_len, kv_len, batch=batch if INTERPRETING else 2), options_of(case, **more))
    assert report.backend == "triton"
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


def singles() -> Iterator[Any]:
    for case in (PLAIN, *SINGLES):
        if case["layout"] != "thd":
            slow = any(case == PLAIN | level for level in REPEATED)
            yield pytest.param(case, marks=[pytest.mark.slow] if slow else [], id=name_of(case))


@pytest.mark.parametrize("case", [*singles()])
def test_each_option_alone(case: dict[str, Any]) -> None:
    """In the interpreter, queries and keys take more than one step of each loop."""
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


@pytest.mark.parametrize("scale", [-0.3, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (1.0, 0.0, 1e-42))])
def test_any_scale(scale: float) -> None:
    """The fast variant finds the largest score from the largest product, which holds only for positive scales."""
    check(PLAIN | {"band": "causal"}, 20, 70, batch=1, scale=scale)


# The fast tier has a padded width and the widest. The wide sweep has the others in 16 bits.
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


@pytest.mark.parametrize(
    "case",
    [
        PLAIN | {"sinks": True},
        pytest.param(PLAIN | {"band": "window", "sinks": True}, marks=pytest.mark.slow),
        pytest.param(PLAIN | {"dropout": True}, marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_few_queries_and_many_keys_are_split_and_merged(case: dict[str, Any]) -> None:
    """There are more keys than one part takes in any configuration; a sink is counted once."""
    check(case, 2, 140 if INTERPRETING else 5000, batch=1)


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


def test_precision_tf32_is_taken() -> None:
    check(PLAIN, 40, 40, batch=1, precision="tf32")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=["no-batch", "no-queries", "no-keys"])
def test_nothing_to_attend_to(shape: tuple[int, int, int, int], direction: str) -> None:
    """B = 0, Sq = 0 and Sk = 0 give zeros and −inf (with a sink, the sink), and zero gradients."""
    b, h, q_len, kv_len = shape
    tensors = {n: torch.ones((b, h, s, 16), device=DEVICE) for n, s in (("q", q_len), ("k", kv_len), ("v", kv_len))}
    tensors["sinks"] = torch.tensor([0.5, -1.0], device=DEVICE)
    tensors["attn_mask"] = torch.zeros((1, kv_len), device=DEVICE)
    if direction == "backward":
        tensors["do"] = torch.ones((b, h, q_len, 16), device=DEVICE)
    grads = ("dq", "dk", "dv", "dattn_mask", "dsinks")
    problem = Problem.create(tensors, Options(return_lse=True, grads=grads), direction)
    for t in problem.outputs.values():
        t.fill_(float("nan"))
    run([problem], "triton")
    for name, t in problem.outputs.items():
        if name == "lse" and not kv_len:
            assert torch.equal(t, tensors["sinks"][None, :, None].expand_as(t))
        elif name != "lse" and not (name in ("o",) and kv_len):
            assert torch.equal(t, torch.zeros_like(t)), name


def test_rows_that_see_nothing_and_padding() -> None:
    """Fully masked rows, kv_lengths of 0 and padding give o 0, lse −inf, zero gradients; padding is never read."""
    case = PLAIN | {"lengths": True}
    tensors = tensors_of(case, 12, 9)
    tensors["q_lengths"], tensors["kv_lengths"] = torch.tensor([12, 7]), torch.tensor([0, 4])
    tensors["attn_mask"] = torch.ones((2, 1, 12, 9), dtype=torch.bool, device=DEVICE)
    tensors["attn_mask"][1, :, 3] = False
    for name in ("q", "do"):
        tensors[name][1, :, 7:] = float("nan")
    for name in ("k", "v"):
        tensors[name][0], tensors[name][1, :, 4:] = float("nan"), float("nan")
    forward = Problem.create({n: t for n, t in tensors.items() if n != "do"}, Options(return_lse=True))
    run([forward], "triton")
    backward = Problem.create({**tensors, **forward.outputs}, Options(), "backward")
    run([backward], "triton")
    o, lse = forward.outputs["o"], forward.outputs["lse"]
    for seen in (o[0], o[1, :, 3], o[1, :, 7:], backward.outputs["dq"][0], backward.outputs["dk"][0]):
        assert torch.equal(seen, torch.zeros_like(seen))
    for seen in (lse[0], lse[1, :, 3], lse[1, :, 7:]):
        assert torch.equal(seen, torch.full_like(seen, float("-inf")))
    assert not any(t.isnan().any() for t in (*forward.outputs.values(), *backward.outputs.values()))
    assert o[1, :, :3].abs().min() > 0


def test_closed_forms() -> None:
    """q = k = 0 gives the mean of v and ln Sk; one key gives o = v, dv = Σ do; a loss of lse alone gives dv = 0."""
    g = torch.Generator().manual_seed(4)
    v, do = (torch.randn((1, 1, s, 16), generator=g).to(DEVICE) for s in (50, 9))
    zero = {"q": torch.zeros(1, 1, 9, 16, device=DEVICE), "k": torch.zeros(1, 1, 50, 16, device=DEVICE), "v": v}
    mean = Problem.create(zero, Options(return_lse=True))
    run([mean], "triton")
    torch.testing.assert_close(mean.outputs["o"], v.mean(2, keepdim=True).expand(1, 1, 9, 16), rtol=0, atol=1e-6)
    torch.testing.assert_close(mean.outputs["lse"], torch.full((1, 1, 9), 50.0, device=DEVICE).log(), rtol=0, atol=1e-6)
    lone = {"q": do, "k": v[:, :, :1], "v": v[:, :, :1], "do": do}
    one = Problem.create(lone, Options(), "backward")
    run([one], "triton")
    torch.testing.assert_close(one.outputs["dv"], do.sum(2, keepdim=True), rtol=0, atol=1e-5)
    for name in ("dq", "dk"):
        torch.testing.assert_close(one.outputs[name], torch.zeros_like(one.outputs[name]), rtol=0, atol=2e-5)
    lse_only = {**zero, "do": torch.zeros_like(do), "dlse": torch.ones((1, 1, 9), device=DEVICE)}
    loss = Problem.create(lse_only, Options(), "backward")
    run([loss], "triton")
    assert torch.equal(loss.outputs["dv"], torch.zeros_like(v))
