"""`quantize` and `dequantize` are right, and attention over 8-bit keys equals float64 with the dequantized values."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from flashpoint_kernels import Options, ProblemError, attention, dequantize, quantize, verify
from flashpoint_kernels.dispatching.support import unsupported
from flashpoint_kernels.quantization import restored
from tests.conftest import DEVICE
from tests.support.kernels.serving import DTYPES, FORMS, of_eight_bits
from tests.support.kernels.solving import forward, normal, qkv, spec_of
from tests.support.kernels.triton_cases import BACKENDS, CASES, EACH, PLAIN, each_pair, options_of, tensors_of


def request(case: dict[str, Any], backend: str) -> tuple[dict[str, torch.Tensor], Options]:
    """Return a forward request for `case` with 8-bit keys; the case's number selects their dtype and form of scales."""
    number = CASES.index(case) if case in CASES else 0
    dtype, form = list(DTYPES)[number % 2], FORMS[number // 2 % 4]
    given = {n: t for n, t in tensors_of(case, 37, 70).items() if n not in ("do", "dlse")}
    sequences = 3 if case["layout"] == "thd" else 2
    options = replace(options_of(case), backend=backend, grads=("dq",))
    return of_eight_bits(given, case["layout"], dtype, form, sequences=sequences), options


def check(tensors: dict[str, torch.Tensor], options: Options) -> None:
    """Assert that `verify` finds exact answers, or that the error names exactly the options that the backend lacks."""
    if errors := unsupported(options.backend, spec_of(tensors, options, "forward")):
        with pytest.raises(ProblemError) as refused:
            verify(tensors, options)
        assert list(refused.value.errors) == errors
        return
    report = verify(tensors, options)
    assert report.backend == options.backend
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


# quantize and dequantize


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_keeps_its_largest_number_and_the_rest_to_the_rounding(dtype: torch.dtype, of: torch.dtype) -> None:
    x = (normal(2, 3, 50, 16) * normal(2, 3, 50, 1, seed=1).mul(4).exp()).to(of)
    values, scale = quantize(x, dtype)
    assert (values.dtype, values.shape, scale.dtype, scale.shape) == (dtype, x.shape, torch.float32, x.shape[:-1])
    limit = 127 if dtype == torch.int8 else 448
    torch.testing.assert_close(scale, (x.float().abs().amax(-1) / limit), rtol=1e-6, atol=1e-38)
    assert torch.equal(values.float().abs().amax(-1), torch.full_like(scale, limit))
    back = dequantize(values, scale, torch.float64)
    off = (back - x.double()).abs()
    step = scale.double()[..., None]
    allowed = step / 2 if dtype == torch.int8 else torch.maximum(x.double().abs() / 16, step * 2.0**-10)
    assert (off <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_rows_of_nothing_and_of_next_to_nothing(dtype: torch.dtype, of: torch.dtype) -> None:
    """Zeros stay zeros, subnormal numbers give nearly zero, and empty tensors are allowed."""
    x = torch.zeros(3, 8, device=DEVICE, dtype=of)
    x[1], x[2, 0] = 1e-40, -1e-38
    values, scale = quantize(x, dtype)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert not values.float()[0].any()
    assert (dequantize(values, scale) - x.float()).abs().max() <= scale.max()
    for shape in ((0, 8), (4, 0), (0,)):
        values, scale = quantize(torch.zeros(shape, dtype=of), dtype)
        assert (values.shape, scale.shape) == (shape, shape[:-1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_says_so_by_its_scale(dtype: torch.dtype, bad: float) -> None:
    x = normal(3, 8)
    x[1, 2] = bad
    values, scale = quantize(x, dtype)
    assert scale.isfinite().tolist() == [True, False, True]
    assert not dequantize(values, scale)[1].isfinite().any()
    assert torch.equal(values[[0, 2]].float(), quantize(x[[0, 2]], dtype)[0].float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_quantize_made_is_restored_as_dequantize_does(dtype: torch.dtype) -> None:
    every = torch.arange(-127, 128).to(DEVICE, torch.int8)
    numbers = every if dtype == torch.int8 else every.view(dtype)[~every.view(dtype).isnan()]
    for scale in (1.0, 2.0**-130, 1e30):
        scales = torch.full((), scale, device=DEVICE)
        assert torch.equal(restored(numbers, scales), dequantize(numbers, scales))
    values, scales = quantize(normal(3, 5, 7), dtype)
    assert torch.equal(restored(values, scales), dequantize(values, scales))
    x = normal(2, 4)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    assert not restored(*quantize(x, dtype)).isfinite().any()


def test_dequantize_takes_scales_that_broadcast() -> None:
    values = torch.arange(-12, 12, dtype=torch.int8).view(2, 3, 4)
    assert torch.equal(dequantize(values, 0.5), values.float() * 0.5)
    assert torch.equal(dequantize(values, 0.1, torch.float64), values.double() * 0.1)
    scale = torch.tensor([[2.0], [3.0]])
    assert torch.equal(dequantize(values, scale, torch.bfloat16), (values.float() * scale[..., None]).bfloat16())


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("x", lambda: quantize(torch.zeros(3, dtype=torch.int32))),
        ("x", lambda: quantize(torch.zeros(()))),
        ("x", lambda: quantize([1.0])),  # type: ignore[arg-type]
        ("dtype", lambda: quantize(torch.zeros(3), torch.uint8)),
        ("values", lambda: dequantize(torch.zeros(3), 1.0)),
        ("values", lambda: dequantize(torch.zeros((), dtype=torch.int8), 1.0)),
        ("scale", lambda: dequantize(torch.zeros(3, 4, dtype=torch.int8), torch.ones(2))),
        ("scale", lambda: dequantize(torch.zeros(3, 4, dtype=torch.int8), torch.ones(2, 3))),
    ],
)
def test_what_cannot_be_quantized_is_named(field: str, call: Any) -> None:
    with pytest.raises(ProblemError) as refused:
        call()
    assert [name for name, _ in refused.value.errors] == [field]


# attention


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.parametrize("backend", EACH)
def test_each_form_of_scales_alone(backend: str, layout: str, dtype: str, form: str) -> None:
    case = PLAIN | {"layout": layout, "group": 2}
    given = {n: t for n, t in tensors_of(case, 37, 70).items() if n != "do"}
    sequences = 3 if layout == "thd" else 2
    tensors = of_eight_bits(given, layout, dtype, form, sequences=sequences)
    check(tensors, Options(layout=layout, backend=backend))


@pytest.mark.parametrize(("backend", "case"), [*each_pair()])
def test_with_every_pair_of_options(backend: str, case: dict[str, Any]) -> None:
    check(*request(case, backend))


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("backend", EACH)
def test_one_head_forms(backend: str, rank: int) -> None:
    t = of_eight_bits(qkv(1, 1, 5, 7, 16), "bhsd")
    expected = forward(backend, t)
    drop = (0, 1) if rank == 2 else (1,)
    few = {name: x.squeeze(drop) for name, x in t.items()}
    for name, x in forward(backend, few).items():
        assert torch.equal(x, expected[name].squeeze(drop)), name


@pytest.mark.parametrize("backend", EACH)
def test_it_is_attention_over_what_the_numbers_stand_for(backend: str) -> None:
    """With equal scores, o is the mean of the dequantized values; the test does not use `verify`."""
    t = qkv(2, 4, 5, 7, 16, kv_heads=2)
    t["q"].zero_()
    t = of_eight_bits(t, "bhsd", "float8_e4m3fn")
    mean = dequantize(t["v"], t["v_scale"]).mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(forward(backend, t)["o"], mean.expand(-1, -1, 5, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "lengths"),
    [
        *product(BACKENDS[:2], [(37, 70), (600, 1100)]),
        *(pytest.param("triton", lengths, marks=pytest.mark.slow) for lengths in [(37, 70), (100, 270)]),
        pytest.param("triton", (600, 1100), marks=pytest.mark.full),
    ],
)
def test_bits_are_the_same_alone_and_among_others(backend: str, lengths: tuple[int, int]) -> None:
    one = of_eight_bits(qkv(1, 3, *lengths, 40, seed=100), "bhsd")
    alone = forward(backend, one, causal=True)
    others = of_eight_bits(qkv(3, 3, *lengths, 40, seed=200), "bhsd")
    for place in range(3):
        batch = {name: t.clone() for name, t in others.items()}
        for name, t in batch.items():
            t[place] = one[name][0]
        for name, t in forward(backend, batch, causal=True).items():
            assert torch.equal(t[place], alone[name][0]), (name, place)


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_answer_is_seen(form: str) -> None:
    """`verify` compares a caller's answers with dequantized values: answers that ignore the scales are wrong."""
    t = of_eight_bits({n: x for n, x in qkv(2, 4, 5, 7, 16).items() if n != "do"}, "bhsd", "int8", form)
    right = attention(**t)
    assert verify(t, answers={"o": right}).ok
    assert not verify(t, answers={"o": right * 1.001}).ok
    unscaled = attention(t["q"], t["k"].float(), t["v"].float())
    assert not verify(t, answers={"o": unscaled}).ok


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_at_all(backend: str, form: str) -> None:
    """Without keys, the scales that a test draws are finite, and o is 0."""
    t = of_eight_bits({n: x for n, x in qkv(2, 4, 5, 0, 16).items() if n != "do"}, "bhsd", "int8", form)
    check(t, Options(backend=backend))
    assert not attention(**t, backend=backend).any()


def test_least_int8_and_cancelling_values_are_judged() -> None:
    """`verify` judges -128, which has no positive counterpart, and bounds cancelling values by their terms' size."""
    t = qkv(1, 1, 4, 64, 16)
    k = torch.zeros(1, 1, 64, 16, dtype=torch.int8)
    v = torch.tensor([127, -128], dtype=torch.int8).repeat(32)[:, None].expand(64, 16)[None, None].contiguous()
    scale = torch.ones(1, 1, 64)
    scale[..., ::2] *= 128 / 127
    t = {"q": t["q"], "k": k, "v": v, "k_scale": torch.ones(()), "v_scale": scale}
    for backend in BACKENDS:
        check(t, Options(backend=backend))


def test_a_number_is_a_tensor_without_dimensions() -> None:
    t = of_eight_bits(qkv(1, 2, 5, 7, 16), "bhsd", "int8", "number")
    t.pop("do")
    expected = attention(**t)
    scales = {name: float(t[name]) for name in ("k_scale", "v_scale")}
    assert attention(**t | {"k_scale": 2, "v_scale": np.float32(1)}).isfinite().all()
    assert torch.equal(attention(**t | scales), expected)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**t | scales), expected)


# refusals

EIGHT = {n: t for n, t in of_eight_bits(qkv(2, 4, 5, 7, 16, kv_heads=2), "bhsd").items() if n != "do"}


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("k_scale", {"k_scale": None}),
        ("v_scale", {"v_scale": None}),
        ("k_scale", {"k_scale": "1"}),
        ("k_scale", {"k_scale": True}),
        ("k_scale", {"k_scale": torch.ones(1, 2, dtype=torch.int32)}),
        ("k_scale", {"k_scale": torch.ones(3, 2)}),
        ("k_scale", {"k_scale": torch.ones(2)}),
        ("v_scale", {"v_scale": torch.ones(2, 2, 8)}),
        ("v_scale", {"v_scale": float("nan")}),
        ("k_scale", {"k_scale": torch.full((2, 2, 7), torch.inf)}),
        ("v", {"v": EIGHT["v"].to(torch.float8_e4m3fn)}),
        ("v", {"v": EIGHT["v"].float(), "v_scale": None}),
        ("k", {"k": EIGHT["k"].view(torch.uint8)}),
        ("q", {"q": EIGHT["q"].to(torch.float8_e4m3fn)}),
        ("k_scale", {"k": EIGHT["k"].float(), "v": EIGHT["v"].float()}),
    ],
)
def test_what_is_wrong_is_named(field: str, changed: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as refused:
        attention(**(EIGHT | changed))
    assert field in [name for name, _ in refused.value.errors]


def test_gradients_are_refused_by_name() -> None:
    do = {"do": EIGHT["q"]}
    for given, field in ((EIGHT | do, "k_scale"), ({**EIGHT, **do, "k_scale": None, "v_scale": None}, "k")):
        tensors = {name: t for name, t in given.items() if t is not None}
        with pytest.raises(ProblemError) as refused:
            spec_of(tensors, Options(), "backward")
        assert field in [name for name, _ in refused.value.errors]
        with pytest.raises(ProblemError):
            verify(tensors)
