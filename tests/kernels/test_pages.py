"""Keys and values in any pages give the bits of the same keys without pages, and other memory of pages is not read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, ProblemError, attention, run, verify
from flashpoint_kernels.dispatching.support import unsupported
from flashpoint_kernels.problems.cost import extent_of
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_kernels.problems.reproducible import split
from tests.support.kernels.serving import DTYPES, in_pages, of_eight_bits
from tests.support.kernels.solving import forward, normal, qkv, spec_of
from tests.support.kernels.triton_cases import BACKENDS, CASES, EACH, PLAIN, each_pair, options_of, tensors_of

SIZES = (1, 7, 16, 35)  # keys in a page: 70 keys fill whole pages of each size but 16


def same(backend: str, dense: dict[str, torch.Tensor], paged: dict[str, torch.Tensor], **options: Any) -> None:
    expected = forward(backend, dense, **options)
    for name, t in forward(backend, paged, **options).items():
        assert torch.equal(t, expected[name]), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.parametrize("backend", EACH)
def test_bits_are_those_of_the_keys_that_lie_together(backend: str, layout: str, size: int) -> None:
    case = PLAIN | {"layout": layout, "group": 2, "lengths": layout != "thd", "dims": (16, 16)}
    dense = {n: t for n, t in tensors_of(case, 37, 70).items() if n != "do"}
    for strided in (False, True):
        same(backend, dense, in_pages(dense, layout, size, strided=strided), layout=layout, causal=True)


@pytest.mark.parametrize(("backend", "case"), [*each_pair()])
def test_with_every_pair_of_options(backend: str, case: dict[str, Any]) -> None:
    """Every pair of options is exact, half of the cases with 8-bit keys, or the error names what the backend lacks."""
    number = CASES.index(case)
    tensors = {n: t for n, t in tensors_of(case, 37, 70).items() if n not in ("do", "dlse")}
    options = replace(options_of(case), backend=backend, grads=("dq",))
    if number % 2:
        form = ("row", "sequence")[number // 2 % 2]
        sequences = 3 if case["layout"] == "thd" else 2
        dtype = list(DTYPES)[number // 4 % 2]
        tensors = of_eight_bits(tensors, case["layout"], dtype, form, sequences=sequences)
    paged = in_pages(tensors, case["layout"], (7, 35)[number % 2], seed=number)
    if errors := unsupported(backend, spec_of(paged, options, "forward")):
        with pytest.raises(ProblemError) as refused:
            verify(paged, options)
        assert list(refused.value.errors) == errors
        return
    report = verify(paged, options)
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)
    dense = Problem.create(tensors, replace(options, return_lse=True))
    run([dense], backend)
    assert verify(paged, options, answers=dense.outputs).ok


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("backend", EACH[:2] + EACH[3:])
def test_bits_are_the_same_alone_and_among_others(backend: str, eight: bool) -> None:
    """A sequence has the same bits for any neighbours, position in the batch, page size and page numbers."""
    t = qkv(3, 4, 37, 70, 40, kv_heads=2) | {"kv_lengths": torch.tensor([70, 13, 70])}
    t.pop("do")
    if eight:
        t = of_eight_bits(t, "bhsd", sequences=3)
    among = forward(backend, in_pages(t, "bhsd", 16), causal=True)
    for place in range(3):
        one = {name: x[place : place + 1] for name, x in t.items()}
        for size in (5, 16):
            alone = forward(backend, in_pages(one, "bhsd", size, seed=place), causal=True)
            for name, x in alone.items():
                assert torch.equal(among[name][place], x[0]), name


@pytest.mark.parametrize("backend", EACH)
def test_problems_share_a_call(backend: str) -> None:
    """Problems that differ in page size, lengths, heads and layout share a call; each has the same bits as alone."""
    problems, alone = [], []
    for n, (layout, size) in enumerate((("bhsd", 7), ("bshd", 16), ("thd", 3))):
        case = PLAIN | {"layout": layout, "group": 1 + n % 2}
        tensors = {name: t for name, t in tensors_of(case, 20 + n, 48 - n, seed=n).items() if name != "do"}
        paged = in_pages(tensors, layout, size)
        alone.append(forward(backend, paged, layout=layout))
        problems.append(Problem.create(paged, Options(layout=layout, return_lse=True)))
    run(problems, backend)
    for problem, expected in zip(problems, alone, strict=True):
        for name, t in expected.items():
            assert torch.equal(problem.outputs[name], t), name


def test_a_launch_is_of_one_kind() -> None:
    t = {n: x for n, x in qkv(2, 2, 5, 12, 16).items() if n != "do"}
    kinds = [t, in_pages(t, "bhsd", 4)]
    kinds += [in_pages(of_eight_bits(t, "bhsd", dtype), "bhsd", 4) for dtype in DTYPES]
    kinds += [of_eight_bits(t, "bhsd", dtype) for dtype in DTYPES]
    problems = [Problem.create(kind, Options()) for kind in kinds]
    assert len({launch_key(problem.spec, "triton") for problem in problems}) == len(kinds)
    assert {problem.spec.level for problem in problems} == {0}
    with pytest.raises(ValueError, match="share one launch key"):
        run(problems[:2], "tiled")


@pytest.mark.parametrize("backend", EACH[:2] + EACH[3:])
def test_a_problem_that_runs_again_reads_its_pages_again(backend: str) -> None:
    t = {n: x for n, x in qkv(1, 2, 5, 12, 16).items() if n != "do"}
    problem = Problem.create(in_pages(t, "bhsd", 4), Options())
    run([problem], backend)
    problem.tensors["k"].nan_to_num_(0.0).mul_(2.0)
    run([problem], backend)
    again = forward(backend, {name: x for name, x in problem.tensors.items() if name != "o"})
    assert torch.equal(problem.outputs["o"], again["o"])


@pytest.mark.parametrize("backend", EACH[:2] + EACH[3:])
def test_parts_of_a_problem_have_its_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashpoint_kernels.problems.reproducible.PART_SECONDS", 1e-5)
    t = {n: x for n, x in qkv(3, 4, 64, 96, 32, kv_heads=2).items() if n != "do"}
    for form in ("row", "head", "number"):
        paged = in_pages(of_eight_bits(t, "bhsd", "int8", form), "bhsd", 16)
        parts = split(problem := Problem.create(paged, Options()), backend)
        assert len(parts) == 6
        run([problem], backend)
        expected = problem.outputs["o"].clone()
        problem.outputs["o"].fill_(torch.nan)
        for part in reversed(parts):
            run([part], backend)
        assert torch.equal(problem.outputs["o"], expected), form


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("backend", EACH)
def test_one_head_forms(backend: str, rank: int) -> None:
    """k and v have as many dimensions as q: without an axis of heads, or one page (keys, D) if q is one matrix."""
    q, k, v = normal(2, 5, 16), normal(4, 6, 16, seed=1), normal(4, 6, 16, seed=2)
    table, lengths = torch.tensor([[3, 0], [1, 9]], dtype=torch.int32), torch.tensor([11, 6])
    if rank == 2:
        q, k, v, table, lengths = q[0], k[3], v[3], torch.zeros(1, 2, dtype=torch.int32), lengths[:1]
    paged = {"q": q, "k": k, "v": v, "block_table": table, "kv_lengths": lengths}
    full = {name: x.reshape(-1, 1, *x.shape[-2:]) for name, x in paged.items() if name in "qkv"}
    expected = forward(backend, {**paged, **full})
    for name, x in forward(backend, paged).items():
        assert torch.equal(x, expected[name].view(x.shape)), name


def test_no_key_and_no_page() -> None:
    q, k = normal(2, 3, 5, 16), normal(4, 3, 6, 16)
    table = torch.tensor([[7, 7], [2, 1]], dtype=torch.int32)
    for backend in BACKENDS:
        lengths = torch.tensor([0, 12])
        actual = forward(backend, {"q": q, "k": k, "v": k, "block_table": table, "kv_lengths": lengths})
        assert not actual["o"][0].any()
        assert actual["lse"][0].isneginf().all()
        assert actual["lse"][1].isfinite().all()
        for pool, pages in ((0, 2), (4, 0), (0, 0)):
            few = {"k": k[:pool], "v": k[:pool], "block_table": table[:, :pages], "kv_lengths": torch.tensor([0, 0])}
            assert not forward(backend, {"q": q, **few})["o"].any()


# Cost estimates


def test_prices_are_those_of_the_keys_that_are_there() -> None:
    t = {n: x for n, x in qkv(2, 4, 5, 12, 16, kv_heads=2).items() if n != "do"} | {"kv_lengths": torch.tensor([9, 12])}
    dense, paged = (Problem.create(x, Options(causal=True)) for x in (t, in_pages(t, "bhsd", 4, spare=10)))
    assert paged.flops == dense.flops
    assert paged.spec.flops == dense.spec.flops
    index = {"kv_lengths": t["kv_lengths"].numpy()}
    assert extent_of(paged.spec, index) == extent_of(dense.spec, index)
    assert extent_of(paged.spec) == extent_of(dense.spec)
    given = sum(x.numel() * x.element_size() for x in paged.tensors.values())
    assert paged.spec.input_bytes == given
    assert paged.spec.footprint == given + paged.outputs["o"].nbytes


def test_prices_of_packed_queries_over_pages() -> None:
    """Without the lengths, the estimate pairs all queries with all keys of a sequence's pages, and ignores `causal`."""
    case = PLAIN | {"layout": "thd"}
    t = {n: x for n, x in tensors_of(case, 24, 48).items() if n != "do"}
    paged = in_pages(t, "thd", 4)  # 24 keys a sequence at most
    problem = Problem.create(paged, Options(layout="thd", causal=True))
    spec, lengths = problem.spec, paged["kv_lengths"]
    assert (spec.q_len, spec.kv_len, spec.batch) == (24, 24, 3)
    assert spec.flops == 2 * spec.q_heads * 24 * 24 * 32
    index = {"kv_lengths": lengths.numpy(), "cu_seqlens_q": t["cu_seqlens_q"].numpy()}
    pairs = int((t["cu_seqlens_q"].diff() * lengths).sum())
    assert extent_of(spec, index).pairs == pairs
    assert extent_of(spec).pairs == 24 * 24
    assert problem.flops == 2 * spec.q_heads * pairs * 32


# Refusals

DENSE = {n: t for n, t in qkv(2, 4, 5, 12, 16, kv_heads=2).items() if n != "do"}
PAGED = in_pages(DENSE, "bhsd", 5)
THD = {"layout": "thd"}
PACKED = {n: t for n, t in tensors_of(PLAIN | THD, 12, 16).items() if n != "do"}


def table(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32).view(2, 3)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("kv_lengths", {"kv_lengths": None}),
        ("kv_lengths", {"kv_lengths": torch.tensor([12, 16])}),
        ("kv_lengths", {"kv_lengths": torch.tensor([-1, 12])}),
        ("kv_lengths", {"kv_lengths": torch.tensor([12])}),
        ("block_table", {"block_table": PAGED["block_table"].float()}),
        ("block_table", {"block_table": PAGED["block_table"][0]}),
        ("block_table", {"block_table": PAGED["block_table"][:1]}),
        ("block_table", {"block_table": [[0.5, 1, 2], [2, 3, 4]]}),
        ("block_table", {"block_table": table(0, 1, 2, 3, 4, 9)}),
        ("block_table", {"block_table": table(0, 1, 2, 3, -1, 4)}),
        ("block_table", {"k": PAGED["k"][:0], "v": PAGED["v"][:0]}),
        ("k", {"k": PAGED["k"][:, :, :0], "v": PAGED["v"][:, :, :0]}),
        ("k", {"k": PAGED["k"][..., :8]}),
        ("k", {"k": PAGED["k"][0], "v": PAGED["v"][0]}),
        ("v", {"v": PAGED["v"][1:]}),
        ("v", {"v": PAGED["v"][:, :, 1:]}),
        ("v", {"v": PAGED["v"][:, :1]}),
        ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 1, 12])}),
    ],
)
def test_what_is_wrong_is_named(field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as refused:
        attention(**(PAGED | changed))
    assert field in [name for name, _ in refused.value.errors]


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 8, 9, 16])}),
        ("cu_seqlens_q", {"cu_seqlens_q": None}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 4, 5, 11])}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([[0, 4, 12]])}),
        ("q_lengths", {"q_lengths": torch.tensor([1, 1, 1])}),
        ("k", {"k": PACKED["k"]}),
        ("kv_lengths", {"kv_lengths": None}),
    ],
)
def test_what_is_wrong_with_packed_queries_is_named(field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as refused:
        attention(**(in_pages(PACKED, "thd", 4) | changed), layout="thd")
    assert field in [name for name, _ in refused.value.errors]


def test_a_number_beyond_the_pool_is_said_with_its_place() -> None:
    with pytest.raises(ProblemError, match=r"block_table: \[1, 2\] is page 9, but k has 9 pages, from 0"):
        attention(**(PAGED | {"block_table": table(0, 1, 2, 3, 4, 9)}))


def test_gradients_are_refused_by_name() -> None:
    with pytest.raises(ProblemError, match="block_table: is only for the forward"):
        spec_of(PAGED | {"do": PAGED["q"]}, Options(), "backward")
    with pytest.raises(ProblemError, match="block_table"):
        verify(PAGED | {"do": PAGED["q"]})
