"""Answers are right for head dimensions above 256 (such as 576) and for sums of two powers of two (such as 192)."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, attention, quantize, run, verify
from flashpoint_kernels.dispatching.dispatch import available_backends
from flashpoint_kernels.triton_backend.host.config import exact, parts_of, tiles
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB, TABLES
from flashpoint_kernels.triton_backend.host.launch import forward_calls
from tests.conftest import DEVICE
from tests.support import oracle
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of
from tests.support.sweep.bounds import bounds
from tests.support.sweep.check import compare

BACKENDS = [name for name in ("triton", "cpu", "tiled") if name in available_backends(DEVICE)]
CASES = [
    PLAIN | {"dtype": "float16", "band": "causal", "group": 2, "dims": (192, 128)},
    PLAIN | {"dtype": "bfloat16", "layout": "thd", "band": "causal", "dims": (576, 512)},
    PLAIN | {"dtype": "float16", "band": "window", "mask": "full", "alibi": True, "sinks": True, "dims": (300, 40)},
    PLAIN | {"lengths": True, "softcap": 3.0, "layout": "bshd", "dims": (130, 576)},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 70), (3, 90)], ids=["blocks", "packed"])
def test_answers(case: dict[str, Any], backend: str, q_len: int, kv_len: int) -> None:
    tensors = {n: t for n, t in tensors_of(case, q_len, kv_len).items() if n not in ("do", "dlse")}
    report = verify(tensors, replace(options_of(case, return_lse=True), backend=backend))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


# D and Dv; "packed" has few queries, so that dQ has packed blocks
GRADIENTS = [
    PLAIN | {"dims": (257, 64), "dtype": "float16", "band": "causal", "group": 2},
    PLAIN | {"dims": (320, 257), "dtype": "bfloat16", "band": "window", "softcap": 3.0, "sinks": True, "mask": "heads"},
    PLAIN | {"dims": (512, 512), "layout": "thd", "band": "causal", "dlse": True},
    PLAIN | {"dims": (576, 512), "dtype": "bfloat16", "layout": "bshd", "group": 2},
    PLAIN | {"dims": (40, 576), "dropout": True, "alibi": True, "mask": "full", "lengths": True},
    PLAIN | {"dims": (576, 576), "dtype": "float16", "blocks": "own", "group": 2},
]


def gradients_of_each() -> Iterator[Any]:
    """Yield each backend with each case and lengths. `make test` runs half of Triton's, whose interpreter is slow."""
    lengths = [(40, 70), (3, 35)]  # blocks of one head, and packed blocks
    for backend, (n, case), (at, sizes) in product(BACKENDS, enumerate(GRADIENTS), enumerate(lengths)):
        marks = [pytest.mark.slow] if backend == "triton" and (n + at) % 2 else []
        yield pytest.param(backend, case, *sizes, marks=marks, id=f"{backend}-{name_of(case)}-{sizes[0]}")


@pytest.mark.parametrize(("backend", "case", "q_len", "kv_len"), list(gradients_of_each()))
def test_gradients(case: dict[str, Any], backend: str, q_len: int, kv_len: int) -> None:
    """The gradients of wide heads are those of the definition in float64, which shares no code with the kernels."""
    tensors = tensors_of(case, q_len, kv_len)
    options = {**asdict(options_of(case)), "backend": backend}
    problem = Problem.create(tensors, Options(**options), "backward")
    for t in problem.outputs.values():
        t.fill_(torch.nan)
    run([problem], backend)
    truth = oracle.answer(tensors, options)
    allowed = bounds(tensors, options, truth)
    for name, t in problem.outputs.items():
        compare(name, t.cpu(), truth[name], allowed[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_and_8_bit_keys(backend: str) -> None:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 4, 576, generator=g).to(DEVICE)
    k, v = (torch.randn(9, 16, 1, dim, generator=g).to(DEVICE) for dim in (576, 512))
    (k8, k_scale), (v8, v_scale) = quantize(k), quantize(v)
    table = torch.tensor([[3, 1, 7, 0], [3, 8, -1, -1]], dtype=torch.int32)
    tensors = {"q": q, "k": k8, "v": v8, "k_scale": k_scale, "v_scale": v_scale, "block_table": table}
    report = verify(
        tensors | {"kv_lengths": torch.tensor([61, 20])}, Options(layout="bshd", causal=True, backend=backend)
    )
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_may_be_the_first_columns_of_the_keys(backend: str) -> None:
    """Values that are a view of the keys' first columns give the bits of a copy, alone and in a batch."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(1, 16, 1, 576, generator=g).to(DEVICE, torch.float16)
    k = torch.randn(1, 1, 150, 576, generator=g).to(DEVICE, torch.float16)
    view = {"q": q, "k": k, "v": k[..., :512]}
    other = {name: torch.randn_like(t) for name, t in view.items()} | {"v": torch.randn_like(k[..., :512])}
    problems = [Problem.create(t, Options(causal=True)) for t in (other, view)]
    run(problems, backend)
    copied = attention(q, k, k[..., :512].clone(), causal=True, backend=backend)
    assert torch.equal(problems[1].outputs["o"], copied)


def test_a_head_dimension_of_two_powers_of_two_is_not_padded() -> None:
    assert [parts_of(dim) for dim in (128, 160, 192, 256, 320, 576)] == [
        (128, 0), (128, 32), (128, 64), (256, 0), (256, 64), (512, 64),
    ]  # fmt: skip
    assert [parts_of(dim) for dim in (1, 96, 200, 400, 570)] == [(16, 0), (128, 0), (256, 0), (512, 0), (512, 64)]
    assert exact(192, 128)
    assert exact(576, 512)
    assert not exact(570, 512)
    for arch in TABLES:
        for dtype, dim in (("bfloat16", 192), ("bfloat16", 576), ("float32", 576)):
            tile = tiles(arch, dtype, dim, 128 if dim == 192 else 512, 0).forward
            queries_and_keys = (tile.block_m + tile.block_n) * dim * (4 if dtype == "float32" else 2)
            assert queries_and_keys <= SHARED_KIB[arch] * 1024


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton's kernels")
def test_they_do_not_take_the_path_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_HOPPER", "1")
    for dim, value_dim in ((192, 128), (576, 512)):
        shapes = {"q": (1, 1, 70, dim), "k": (1, 1, 70, dim), "v": (1, 1, 70, value_dim)}
        problem = Problem.create(
            {n: torch.ones(s, dtype=torch.float16, device=DEVICE) for n, s in shapes.items()}, Options()
        )
        assert [call.kernel.__name__ for call in forward_calls([problem]) if call.programs] == ["attention_forward"]
