"""The fused backend is right for bands, masks and gradients, and prepares the inputs of torch's CUDA operators."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, ProblemError, attention, available_backends, native, verify
from flashpoint_kernels.dispatching.support import choose_backend
from flashpoint_kernels.torch_backend import fused
from flashpoint_kernels.torch_backend.fused import Call
from tests.conftest import DEVICE, FUSED
from tests.support.kernels.routes import forget
from tests.support.kernels.solving import backward, forward, normal, qkv

SCHEMAS = {
    "_scaled_dot_product_flash_attention":
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "_scaled_dot_product_flash_attention_backward":
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "_scaled_dot_product_efficient_attention":
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        "bool is_causal=False, *, float? scale=None) -> "
        "(Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "_scaled_dot_product_efficient_attention_backward":
        "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
        "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_private_operators_are_as_they_were(name: str) -> None:
    """If this fails, read the new meaning of torch's private operators before you change `fused`."""
    assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 40), (40, 60), (60, 40), (1, 50)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_diagonal_is_put_right(q_len: int, kv_len: int, alignment: str, masked: bool) -> None:
    """Both alignments of the diagonal are right, square or not, without a mask and with one that may hide rows."""
    t = qkv(2, 4, q_len, kv_len, 16, kv_heads=2)
    if masked:
        t["attn_mask"] = normal(2, 1, q_len, kv_len) > 1.0
    report = verify(t, Options(backend=FUSED, causal=True, causal_alignment=alignment))
    assert report.ok, report


BANDS: list[dict[str, Any]] = [
    {"window": (70, 0)},
    {"window": (33, 7)},
    {"window": (-1, 20)},
    {"window": (90, -1)},
    {"causal": True, "causal_alignment": "top_left"},
    {"causal": True, "window": (64, -1)},
    {"causal": True},
    {},
]


MORE: list[tuple[str, ...]] = [(), ("alibi_slopes",), ("sinks",), ("alibi_slopes", "sinks"), ("attn_mask",)]
LENGTHS = [(300, 300), (170, 410), (333, 150)]


def blocks_of_queries() -> Iterator[Any]:
    """Yield all combinations of bands, tensors and lengths; all but one for each band and tensors are marked full."""
    for (b, band), (m, more), (n, lengths) in product(*map(enumerate, (BANDS, MORE, LENGTHS))):
        name = "-".join((str(band), *more, str(lengths)))
        yield pytest.param(band, more, *lengths, marks=[] if n == (b + m) % 3 else pytest.mark.full, id=name)


# test_backends.py checks that `torch` refuses these options on other devices.
IN_C = pytest.mark.skipif(DEVICE != "cpu", reason="options that `torch` has only in the kernels in C, on the CPU")


@IN_C
@pytest.mark.parametrize(("band", "more", "q_len", "kv_len"), [*blocks_of_queries()])
def test_blocks_of_queries_see_what_their_window_and_alibi_say(
    band: dict[str, Any], more: tuple[str, ...], q_len: int, kv_len: int
) -> None:
    """Answers of several blocks of queries are right, with keys before, inside and after the window of each block."""
    t = qkv(2, 4, q_len, kv_len, 16, kv_heads=2)
    tensors = {"alibi_slopes": torch.tensor([[0.25, 0.1, 0.02, -0.01]] * 2), "sinks": normal(4)}
    tensors["attn_mask"] = normal(2, 1, 1, kv_len) > -1.0
    report = verify(t | {name: tensors[name].to(DEVICE) for name in more}, Options(backend=FUSED, **band))
    assert report.ok, "\n".join(str(e) for e in report.tensors if not e.ok)


@IN_C
@pytest.mark.slow
def test_alibi_is_as_exact_at_16k_keys_as_the_tile_loop() -> None:
    """Errors of ALiBi over 16k keys are at most twice those of `tiled`: scores reach −8,192, rounded by 5e-4."""
    t = {name: x for name, x in qkv(1, 2, 300, 16384, 16).items() if name != "do"}
    t["alibi_slopes"] = torch.tensor([0.5, 2.0**-8], device=DEVICE)
    errors = {}
    for backend in (FUSED, "tiled"):
        report = verify(t, Options(backend=backend, causal=True))
        assert report.ok, report
        errors[backend] = max(e.max_rel for e in report.tensors)
    assert errors[FUSED] <= 2 * errors["tiled"], errors


def test_masks_of_any_float_and_shape() -> None:
    t = qkv(2, 4, 20, 30, 16, dtype=torch.bfloat16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in [(30,), (20, 1), (4, 1, 30), (2, 1, 20, 30), (1, 1, 1, 1)]:
            mask = normal(*shape, dtype=dtype)
            assert verify(t | {"attn_mask": mask}, Options(backend=FUSED)).ok, (dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_forward_that_backward_runs_has_the_bits_of_the_one_that_is_brought(dtype: torch.dtype) -> None:
    """The backward gives the same bits whether it computes o and lse or gets them, also for rows without keys."""
    t = qkv(2, 4, 9, 7, 16, kv_heads=2, dtype=dtype)
    saved = forward(FUSED, t, causal=True)
    assert saved["lse"].isinf().any()
    brought, made = backward(FUSED, t | saved, causal=True), backward(FUSED, t, causal=True)
    assert all(torch.equal(brought[name], made[name]) for name in ("dq", "dk", "dv"))


def test_backward_takes_the_lse_of_any_backend() -> None:
    """The backward takes the lse of any backend, also the −∞ that `tiled` returns for a row without keys."""
    t = qkv(1, 2, 9, 4, 8)
    saved = forward("tiled", t, causal=True)
    assert saved["lse"].isinf().any()
    grads = backward(FUSED, t | saved, causal=True)
    expected = backward("reference", t, causal=True)
    for name, x in expected.items():
        torch.testing.assert_close(grads[name], x, rtol=2e-6, atol=2e-6)


def test_without_the_library_torch_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    forget()
    t = {name: x.cpu() for name, x in qkv(1, 2, 5, 5, 8).items() if name != "do"}
    with pytest.raises(ProblemError, match="install a C compiler"):
        attention(**t, backend=FUSED)
    assert choose_backend(Problem.create(t, Options()).spec, available_backends("cpu")) == "tiled"
    assert torch.isfinite(attention(**t)).all()
    forget()


def test_determinism_is_asked_without_filling_new_memory_and_all_is_as_it_was_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    inside, before = [], settings()

    def differentiate(self: Any, dsinks: Any) -> None:
        inside.append(settings())
        1 / (len(inside) - 2)

    monkeypatch.setattr(fused.Prepared, "differentiate", differentiate)
    t = {name: x.cpu() for name, x in qkv(1, 2, 5, 5, 8).items()}
    t |= forward("tiled", t)
    problem = Problem.create(t, Options(deterministic=True), "backward")
    fused.backward([problem])
    assert settings() == before == (False, True)
    with pytest.raises(ZeroDivisionError):
        fused.backward([problem])
    assert inside == [(True, False)] * 2
    assert settings() == before


def efficient(q: Any, k: Any, v: Any, bias: Any, _lse: bool, _p: float, causal: bool, *, scale: float) -> Any:
    """Replace CUDA's memory-efficient operator: check its requirements on a mask, and compute attention."""
    assert not causal
    assert bias.dtype == q.dtype
    assert bias.stride(-1) == 1
    assert bias.data_ptr() % 16 == 0
    assert all(n * bias.itemsize % 16 == 0 for n in bias.stride()[:-1])
    s = (q.float() @ k.float().mT) * scale + bias.float()
    return s.softmax(-1) @ v.float(), s.logsumexp(-1)


def cuda_call(dtype: torch.dtype, bias: torch.Tensor, q_len: int, kv_len: int) -> Call:
    """Return a call as for CUDA, with CPU tensors: two query heads for each key/value head."""
    q, k, v = (normal(1, h, n, 8, dtype=dtype, seed=h).cpu() for h, n in ((4, q_len), (2, kv_len), (2, kv_len)))
    return Call(q, k, v, bias.cpu(), False, 0.3)


def softmax_in_float64(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    assert call.bias is not None
    k, v = (t.double().repeat_interleave(2, 1) for t in (call.k, call.v))
    s = call.q.double() @ k.mT * call.scale + call.bias.double()
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("q_len", "kv_len"), [(16, 24), (5, 11)])
@pytest.mark.parametrize("shape", ["full", "transposed", "keys", "queries", "odd address"])
def test_a_mask_reaches_the_efficient_operator_as_it_must_lie(
    dtype: torch.dtype, q_len: int, kv_len: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_aten", SimpleNamespace(_scaled_dot_product_efficient_attention=efficient))
    numbers = normal(4 * q_len * kv_len + 1, dtype=dtype).float()
    bias = {
        "full": numbers[:-1].view(1, 4, q_len, kv_len),
        "transposed": numbers[:-1].view(1, 4, kv_len, q_len).mT,
        "keys": numbers[:kv_len].view(1, 1, 1, kv_len),
        "queries": numbers[: 4 * q_len].view(1, 4, q_len, 1),
        "odd address": numbers[1:].view(1, 4, q_len, kv_len),
    }[shape]
    call = cuda_call(dtype, bias, q_len, kv_len)
    for actual, exact in zip(call.forward(), softmax_in_float64(call), strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low", [-1e4, -1e6, torch.finfo(torch.float32).min])
def test_cuda_takes_a_mask_of_another_dtype_without_rounding_it(
    dtype: torch.dtype, mask_dtype: torch.dtype, low: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of another dtype is not rounded to q's: a row of numbers beyond q's range still has a softmax and lse."""
    monkeypatch.setattr(fused, "_aten", SimpleNamespace(_scaled_dot_product_efficient_attention=efficient))
    mask = torch.zeros(4, 8)
    mask[1:, 4:], mask[2], mask[3, :4] = low, low, -torch.inf
    mask = mask.to(mask_dtype)
    t = {name: x.cpu() for name, x in qkv(1, 2, 4, 8, 8, dtype=dtype).items() if name != "do"} | {"attn_mask": mask}
    problem = replace(Problem.create(t, Options()), device=torch.device("cuda"))
    ((row, x),) = problem.batches()
    call = fused.Prepared.of(problem, row, x).call
    assert isinstance(call, Call)
    assert call.q.dtype == torch.float32
    s = t["q"].float() @ t["k"].float().mT * 8**-0.5 + mask.float()
    dead = s.amax(-1) == -torch.inf  # in a float16 mask −1e6 is −∞
    assert call.bias is not None
    assert torch.equal(dead, (call.bias.amax(-1) == -torch.inf).expand_as(dead))
    o, lse = call.forward()
    seen = ~dead
    torch.testing.assert_close(o[seen], (s.softmax(-1) @ t["v"].float())[seen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[seen], s.logsumexp(-1)[seen], rtol=1e-6, atol=1e-5)


def test_nothing_is_copied_that_the_operators_take_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(1, 4, 5, 16)
    given = q, q + 1, q + 2

    def operator(*inputs: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert [t.data_ptr() for t in inputs[:3]] == [t.data_ptr() for t in given]
        return q, q[..., 0]

    monkeypatch.setattr(fused, "_aten", SimpleNamespace(_scaled_dot_product_efficient_attention=operator))
    assert Call(*given, None, False, 1.0).forward()[0].data_ptr() == q.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 59, 128])
@pytest.mark.parametrize("mask", [None, "bool", "float", "float32", "transposed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 128), (113, 203), (203, 113)])
def test_cuda_operators(dtype: torch.dtype, dim: int, mask: str | None, causal: bool, q_len: int, kv_len: int) -> None:
    t = {name: x.cuda() for name, x in qkv(2, 4, q_len, kv_len, dim, kv_heads=2, dtype=dtype).items()}
    if mask:
        bias = normal(2, 1, q_len, kv_len, dtype=torch.float32 if mask == "float32" else dtype).cuda()
        t["attn_mask"] = bias > 0 if mask == "bool" else bias.mT.contiguous().mT if mask == "transposed" else bias
    report = verify(t, Options(backend=FUSED, causal=causal))
    assert report.ok, "\n".join(str(e) for e in report.tensors if not e.ok)
    first, second = (backward(FUSED, t, causal=causal) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
