"""The fused backend, tiled and reference equal float64, for each option that they support and in limiting cases."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, ProblemError, attention, verify
from flashpoint_kernels.dispatching.support import choose_backend, unsupported
from tests.conftest import DEVICE, FUSED
from tests.support.kernels.solving import backward, forward, normal, qkv, spec_of
from tests.support.kernels.triton_cases import FACTORS, PLAIN, name_of, options_of, pairs, tensors_of

BACKENDS = [FUSED, "tiled", "reference"]
DTYPES = ["float32", "float16", "bfloat16"]
SINGLES = [PLAIN, *(PLAIN | {name: level} for name, levels in FACTORS.items() for level in levels[1:])]
# Lengths (Sq, Sk) and head dimensions D, as on the docs' reference page.
SHAPES = [
    (1, 1), (3, 3), (64, 1), (239, 1), (799, 3), (1, 239), (113, 203), (128, 217), (113, 211), (108, 256), (1023, 1024),
    (1024, 1023),
]  # fmt: skip
DIMS = [16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]


def check(backend: str, case: dict[str, Any], q_len: int, kv_len: int) -> None:
    """Assert that `verify` finds exact answers, or that the error names exactly the options that the backend lacks."""
    tensors, options = tensors_of(case, q_len, kv_len), replace(options_of(case), backend=backend)
    if errors := unsupported(backend, spec_of(tensors, options, "backward")):
        with pytest.raises(ProblemError) as refused:
            verify(tensors, options)
        assert list(refused.value.errors) == errors
        return
    report = verify(tensors, options)
    assert report.backend == backend
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.parametrize("case", SINGLES, ids=name_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_option_alone(backend: str, case: dict[str, Any]) -> None:
    check(backend, case, 70, 90)


@pytest.mark.parametrize("backend", [FUSED, "tiled"])
def test_every_pair_of_options(backend: str) -> None:
    for case in pairs():
        check(backend, case, 37, 70)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(*case, marks=[] if case == (FUSED, "bfloat16") else pytest.mark.slow)
        for case in product((FUSED, "tiled"), DTYPES)
    ],
)
def test_shapes_and_head_dimensions(backend: str, dtype: str) -> None:
    for n, (q_len, kv_len) in enumerate(SHAPES[:-2]):
        dims = (DIMS[n], DIMS[n])
        check(backend, PLAIN | {"dtype": dtype, "band": "causal", "group": 2, "dims": dims}, q_len, kv_len)


@pytest.mark.full
@pytest.mark.parametrize(("q_len", "kv_len"), SHAPES)
@pytest.mark.parametrize("case", SINGLES, ids=name_of)
@pytest.mark.parametrize("backend", [FUSED, "tiled"])
def test_every_option_at_every_shape(backend: str, case: dict[str, Any], q_len: int, kv_len: int) -> None:
    check(backend, case, q_len, kv_len)


@pytest.mark.full
@pytest.mark.parametrize("dims", [(d, d) for d in DIMS] + [(64, 128), (128, 64), (1, 256), (256, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [FUSED, "tiled"])
def test_every_head_dimension(backend: str, dtype: str, dims: tuple[int, int]) -> None:
    check(backend, PLAIN | {"dtype": dtype, "band": "top_left", "dims": dims}, 113, 203)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("backend", [FUSED, "tiled"])
def test_two_millionths_of_the_largest_value(backend: str, causal: bool) -> None:
    """Errors at B1 H4 N512 D32 in float32 are at most 2e-6 against float64, in the forward and the gradients."""
    report = verify(qkv(1, 4, 512, 512, 32), Options(backend=backend, causal=causal))
    errors = {t.name: t.max_rel for t in report.tensors}
    assert errors.keys() == {"o", "lse", "dq", "dk", "dv"}
    assert max(errors.values()) <= 2e-6, errors


# Answers with a closed form


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_give_the_mean(backend: str) -> None:
    t = qkv(2, 3, 5, 7, 16)
    t["q"].zero_()
    t["k"].zero_()
    actual = forward(backend, t)
    torch.testing.assert_close(actual["o"], t["v"].mean(2, keepdim=True).expand(-1, -1, 5, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual["lse"], torch.full_like(actual["lse"], 7.0).log(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_key_gives_its_value(backend: str) -> None:
    t = qkv(2, 3, 5, 1, 16)
    torch.testing.assert_close(forward(backend, t)["o"], t["v"].expand(-1, -1, 5, -1), rtol=1e-6, atol=1e-6)
    grads = backward(backend, t)
    torch.testing.assert_close(grads["dv"], t["do"].sum(2, keepdim=True), rtol=1e-6, atol=1e-6)
    for name in ("dq", "dk"):
        torch.testing.assert_close(grads[name], torch.zeros_like(grads[name]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_loss_of_lse_alone(backend: str) -> None:
    """A loss of lse alone gives the gradient scale·P·k for q, and no gradient for v."""
    t = qkv(1, 2, 5, 7, 16)
    t["do"].zero_()
    grads = backward(backend, t | {"dlse": torch.ones(1, 2, 5, device=DEVICE)})
    p = torch.softmax(t["q"] @ t["k"].mT / 4.0, -1)
    assert not grads["dv"].any()
    torch.testing.assert_close(grads["dq"], p @ t["k"] / 4.0, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads["dk"], p.mT @ t["q"] / 4.0, rtol=1e-5, atol=1e-6)


# Rows that may see no key


def assert_nothing(answers: dict[str, torch.Tensor], lse: float) -> None:
    for name, t in answers.items():
        assert torch.equal(t, torch.full_like(t, lse if name == "lse" else 0.0)), name


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4), (2, 0, 4)], ids=["no keys", "no batch", "no queries"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sizes(backend: str, shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    t = qkv(batch, 2, q_len, kv_len, 8)
    actual = forward(backend, t) | backward(backend, t)
    assert {name: x.shape for name, x in actual.items()} == {
        "o": (batch, 2, q_len, 8), "lse": (batch, 2, q_len), "dq": t["q"].shape, "dk": t["k"].shape, "dv": t["v"].shape,
    }  # fmt: skip
    assert_nothing(actual, -torch.inf)


@pytest.mark.parametrize("mask", ["bool", "float", "lengths"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fully_masked(backend: str, mask: str) -> None:
    """A first sequence whose rows are all masked does not change the second."""
    t = qkv(2, 2, 5, 7, 8)
    more = {
        "bool": {"attn_mask": torch.tensor([False, True], device=DEVICE).view(2, 1, 1, 1)},
        "float": {"attn_mask": torch.tensor([-torch.inf, 0.0], device=DEVICE).view(2, 1, 1, 1)},
        "lengths": {"kv_lengths": torch.tensor([0, 7])},
    }[mask]
    actual = forward(backend, t | more) | backward(backend, t | more)
    alone = {name: x[1:] for name, x in t.items()}
    expected = forward(backend, alone) | backward(backend, alone)
    assert_nothing({name: x[0] for name, x in actual.items()}, -torch.inf)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name][1:], x, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_rows_before_the_first_key(backend: str) -> None:
    """With bottom-right alignment and Sq > Sk, the first Sq − Sk queries see no key; the rest form a causal square."""
    t = qkv(1, 2, 9, 4, 8)
    actual = forward(backend, t, causal=True) | backward(backend, t, causal=True)
    assert_nothing({name: actual[name][:, :, :5] for name in ("o", "lse", "dq")}, -torch.inf)
    square = {name: x[:, :, 5:] if name in ("q", "do") else x for name, x in t.items()}
    expected = forward(backend, square, causal=True) | backward(backend, square, causal=True)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name][:, :, -x.shape[2] :], x, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_sink_is_the_lse_of_a_row_with_no_key(backend: str) -> None:
    t = qkv(1, 2, 3, 0, 8) | {"sinks": torch.tensor([0.5, -torch.inf], device=DEVICE)}
    actual = forward(backend, t)
    assert actual["lse"].tolist() == [[[0.5] * 3, [-torch.inf] * 3]]
    assert_nothing({"o": actual["o"]} | backward(backend, t, grads=["dq", "dk", "dv", "dsinks"]), 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_never_read(backend: str) -> None:
    """NaN beyond a sequence's length, also in `do`, does not change its answers."""
    t = qkv(2, 2, 6, 8, 16)
    lengths = {"q_lengths": torch.tensor([4, 6]), "kv_lengths": torch.tensor([8, 3])}
    clean = forward(backend, t | lengths) | backward(backend, t | lengths)
    t["q"][0, :, 4:] = t["do"][0, :, 4:] = t["k"][1, :, 3:] = t["v"][1, :, 3:] = torch.nan
    actual = forward(backend, t | lengths) | backward(backend, t | lengths)
    for name, x in actual.items():
        assert torch.equal(x, clean[name]), name
    assert_nothing({name: actual[name][0, :, 4:] for name in ("o", "lse", "dq")}, -torch.inf)
    assert_nothing({name: actual[name][1, :, 3:] for name in ("dk", "dv")}, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_own_sequence(backend: str) -> None:
    t = qkv(3, 2, 6, 8, 16)
    clean = forward(backend, t) | backward(backend, t)
    t["k"][1, 0, 2, 3] = torch.nan
    actual = forward(backend, t) | backward(backend, t)
    assert actual["o"][1, 0].isnan().any()
    for name, x in actual.items():
        assert torch.equal(x[[0, 2]], clean[name][[0, 2]]), name


# Layouts and ranks


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_and_ranks_are_the_same_problem(backend: str) -> None:
    t = qkv(2, 4, 5, 7, 16, kv_heads=2)
    expected = forward(backend, t, causal=True) | backward(backend, t, causal=True)
    swapped = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    options = {"causal": True, "layout": "bshd"}
    actual = forward(backend, swapped, **options) | backward(backend, swapped, **options)
    for name, x in expected.items():
        assert torch.equal(actual[name] if name == "lse" else actual[name].transpose(1, 2), x), name
    packed = {name: x.transpose(1, 2).flatten(0, 1) for name, x in t.items()}
    packed |= {"cu_seqlens_q": torch.tensor([0, 5, 10]), "cu_seqlens_k": torch.tensor([0, 7, 14], dtype=torch.int32)}
    options["layout"] = "thd"
    actual = forward(backend, packed, **options) | backward(backend, packed, **options)
    for name, x in expected.items():
        if name == "lse":
            assert torch.equal(actual[name].view(4, 2, 5).transpose(0, 1), x), name
        else:
            assert torch.equal(actual[name].unflatten(0, (2, -1)).transpose(1, 2), x), name


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_head_forms(backend: str, rank: int) -> None:
    t = qkv(1 if rank == 2 else 3, 1, 5, 7, 16) | {"attn_mask": normal(5, 7) > 0}
    expected = forward(backend, t) | backward(backend, t)
    drop = (0, 1) if rank == 2 else (1,)
    few = {name: x if name == "attn_mask" else x.squeeze(drop) for name, x in t.items()}
    actual = forward(backend, few) | backward(backend, few)
    for name, x in expected.items():
        assert torch.equal(actual[name], x.squeeze(drop)), name


def test_head_dimensions_above_576_are_for_the_reference_alone() -> None:
    t = qkv(1, 1, 2, 2, 577)
    for backend in {FUSED, "tiled", "triton"} & set(BACKENDS):
        with pytest.raises(ProblemError, match=r"a head dimension above 576 \(D and Dv up to 576\)"):
            backward(backend, t)
    for dim in (257, 576, 577):
        t = qkv(1, 1, 2, 2, dim)
        inputs = {name: x for name, x in t.items() if name != "do"}
        for direction, tensors in (("forward", inputs), ("backward", t)):
            for preferred in (FUSED, "tiled"):
                chosen = choose_backend(spec_of(tensors, Options(), direction), (preferred, "reference"))
                assert chosen == ("reference" if dim == 577 else preferred)
        assert attention(**inputs).shape == t["q"].shape


def test_torchs_operators_take_head_dimensions_up_to_256() -> None:
    for dims, fits in (((256, 256), True), ((257, 257), False), ((64, 257), False)):
        missing = unsupported("torch", spec_of(qkv(1, 1, 2, 2, dims[0], value_dim=dims[1]), Options(), "backward"))
        assert ("a head dimension above 256" in str(missing)) != fits
