"""`scaled_dot_product_attention` equals torch's in float64: arguments, shapes, gradients, and in models."""

from __future__ import annotations

import importlib
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flashpoint_kernels import ProblemError, attention, available_backends, scaled_dot_product_attention, sdpa
from tests.conftest import DEVICE
from tests.support import small_models
from tests.support.covering import cover
from tests.support.kernels.solving import normal

torch_sdpa = functional.scaled_dot_product_attention
BACKENDS = [name for name in ("triton", "cpu", "tiled", "reference") if name in available_backends(DEVICE)]
BOUND = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# shapes of query, key, value and the mask
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one head": ((5, 8), (7, 8), (7, 8)),
    "three dimensions": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "four dimensions": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "five dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "wider values": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 16)),
    "one key head for all": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one query head for all": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one value head for all": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)),
    "keys of all sequences": ((3, 2, 5, 8), (1, 2, 7, 8), (2, 7, 8)),
    "queries of all sequences": ((2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 8)),
    "two batch dimensions, one broadcast": ((2, 1, 2, 5, 8), (1, 3, 2, 7, 8), (2, 3, 2, 7, 8)),
    "a mask for all": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (5, 7)),
    "a mask of keys": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (2, 1, 1, 7)),
    "a mask of one number": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (1, 1)),
    "a mask of each head": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (1, 4, 5, 7)),
    "a mask in three dimensions": ((3, 5, 8), (3, 7, 8), (3, 7, 8), (3, 1, 7)),
    "a mask in five dimensions": ((2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8), (2, 1, 1, 5, 7)),
    "a mask for all five dimensions": ((2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8), (1, 1, 2, 5, 7)),
    "no query": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "no sequence": ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 8)),
    "no head": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 16)),
    "nothing at all": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 4)),
    "no sequence of five dimensions": ((0, 3, 4, 5, 8), (0, 3, 4, 7, 8), (0, 3, 4, 7, 8)),
}  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select each backend in turn, because the function has no argument for the backend."""
    monkeypatch.setattr(sdpa, "attention", partial(attention, backend=request.param))
    name: str = request.param
    return name


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [normal(*shape, seed=n).to(dtype).requires_grad_() for n, shape in enumerate(shapes)]


def hold(given: list[Tensor], **how: Any) -> None:
    """Assert that o and all gradients equal torch's in float64; `given` has query, key, value and an optional mask.

    Rounding a score s changes its weight by a relative |s|·eps, which the bound allows.
    """
    o = scaled_dot_product_attention(*given, **how)
    exact = [t.detach().cpu() if t.dtype == torch.bool else t.detach().cpu().double().requires_grad_() for t in given]
    truth = torch_sdpa(*exact, **how)
    assert (o.shape, o.dtype) == (truth.shape, given[0].dtype)
    do = normal(*o.shape, seed=9)
    wanted = [n for n, t in enumerate(given) if t.requires_grad]
    actual = torch.autograd.grad(o, [given[n] for n in wanted], do.to(o))
    expected = torch.autograd.grad(truth, [exact[n] for n in wanted], do.to(o.dtype).cpu().double())
    largest = [t.detach().abs().max().item() if t.numel() else 0.0 for t in exact[:2]]
    scores = max(1.0, largest[0] * largest[1] * exact[0].shape[-1] ** 0.5 / 8)
    for one, other in zip((o, *actual), (truth, *expected), strict=True):
        scale = scores * max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=BOUND[one.dtype] * scale)


@cover(indirect=["backend"], shapes=SHAPES, backend=BACKENDS)
def test_shapes_are_broadcast_as_torchs(shapes: tuple[tuple[int, ...], ...], backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    hold(leaves(*shapes, dtype=dtype))
    if len(shapes) == 3:
        hold(leaves(*shapes, dtype=dtype), is_causal=True, scale=0.3)
    else:
        *given, mask = leaves(*shapes, dtype=dtype)
        hold([*given, mask.detach() > -1])


@cover(
    indirect=["backend"],
    backend=BACKENDS,
    dtype=[torch.float32, torch.float16, torch.bfloat16],
    how={"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.2}},
)
def test_grouped_heads(dtype: torch.dtype, how: dict[str, Any], backend: str) -> None:
    hold(leaves((2, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16), dtype=dtype), enable_gqa=True, **how)
    hold(leaves((6, 5, 16), (3, 9, 16), (3, 9, 16), dtype=dtype), enable_gqa=True, **how)
    hold(leaves((2, 6, 5, 16), (2, 2, 9, 16), (2, 3, 9, 16), dtype=dtype), enable_gqa=True, **how)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@cover(
    indirect=["backend"],
    backend=BACKENDS,
    variant=["causal_upper_left", "causal_lower_right"],
    queries=[4, 7, 11],
)
def test_causal_biases(variant: str, queries: int, backend: str) -> None:
    """With a causal bias, a query that sees no key gets 0, where torch's function may return NaN."""
    from torch.nn.attention import bias

    made = getattr(bias, variant)(queries, 7)
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = leaves((2, 3, queries, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtype=dtype)
    o = scaled_dot_product_attention(*given, made)
    o.sum().backward()
    exact = [t.detach().cpu().double().requires_grad_() for t in given]
    truth = torch_sdpa(*exact, attn_mask=made._materialize(torch.device("cpu")))
    truth.sum().backward()
    torch.testing.assert_close(o.cpu().double(), truth, rtol=0, atol=1e-5)
    for one, other in zip(given, exact, strict=True):
        torch.testing.assert_close(one.grad.cpu().double(), other.grad, rtol=0, atol=1e-5)  # type: ignore[union-attr]


def test_a_causal_bias_reads_no_mask_and_needs_its_own_sizes() -> None:
    from torch.nn.attention.bias import causal_lower_right

    q, k = normal(1, 2, 4, 8), normal(1, 2, 9, 8)
    with pytest.raises(ProblemError, match="is a CausalBias for 4 queries and 9 keys, not for 4 and 4"):
        scaled_dot_product_attention(q, q, q, causal_lower_right(4, 9))
    with pytest.raises(ProblemError, match="must be False with a CausalBias"):
        scaled_dot_product_attention(q, k, k, causal_lower_right(4, 9), is_causal=True)


@pytest.mark.parametrize("mask", [(5, 7), (2, 1, 5, 7), (1, 4, 1, 7)], ids=str)
def test_a_mask_holds_together_with_is_causal(mask: tuple[int, ...], backend: str) -> None:
    """torch's kernel for the CPU takes both, in four dimensions."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    *given, bias = leaves((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), mask, dtype=dtype)
    hold([*given, bias.detach() > -1], is_causal=True)
    o = scaled_dot_product_attention(*given, bias, is_causal=True)
    seen = torch.ones(5, 7, dtype=torch.bool, device=DEVICE).tril()
    expected = scaled_dot_product_attention(*given, bias.masked_fill(~seen, -torch.inf))
    for one, other in zip(
        (o, *torch.autograd.grad(o.sum(), [*given, bias])),
        (expected, *torch.autograd.grad(expected.sum(), [*given, bias])),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    one_head = [t.detach()[0, 0] for t in given]
    o = scaled_dot_product_attention(*one_head, seen[:, [0, 3, 2, 1, 4, 5, 6][:7]], is_causal=True)
    expected = scaled_dot_product_attention(*one_head, seen[:, [0, 3, 2, 1, 4, 5, 6][:7]] & seen)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("heads", [(0, 0, 0), (4, 0, 0), (1, 0, 0), (0, 1, 1), (0, 2, 2), (0, 2, 1)], ids=str)
def test_heads_may_be_none(heads: tuple[int, int, int], grouped: bool) -> None:
    """o and its gradients have torch's shapes, where torch answers: 0 without key heads, empty without query heads."""
    of_q, of_k, of_v = heads
    for lead in ((), (2,), (3, 2)):
        shapes = [(*lead, of_q, 5, 8), (*lead, of_k, 7, 8), (*lead, of_v, 7, 6), (5, 7)]
        *given, mask = leaves(*shapes, dtype=torch.float32)
        if not of_q and max(of_k, of_v) > 1 and not grouped:
            with pytest.raises(ProblemError, match="must be equal or 1"):
                scaled_dot_product_attention(*given)
            continue
        o = scaled_dot_product_attention(*given, mask if of_q else None, enable_gqa=grouped)
        assert o.shape == (*lead, of_q, 5, 6)
        assert not o.any()
        for gradient, t in zip(torch.autograd.grad(o.sum(), given), given, strict=True):
            assert gradient.shape == t.shape
            assert not gradient.any()


def test_the_mask_may_be_a_parameter(backend: str) -> None:
    mask = nn.Parameter(normal(2, 5, 7))
    hold([*leaves((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), dtype=torch.float32), mask])


def test_dropout_keeps_its_share_and_draws_anew() -> None:
    """With values of 1, each row of o is the sum of the kept weights over 1 − p, and each call drops other weights."""
    q, ones = normal(1, 4, 64, 8), torch.ones(1, 4, 256, 8, device=DEVICE)
    k = torch.zeros(1, 4, 256, 8, device=DEVICE)
    torch.manual_seed(3)
    first, second = (scaled_dot_product_attention(q, k, ones, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(3)
    again = scaled_dot_product_attention(q, k, ones, dropout_p=0.25)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert abs(first.mean().item() - 1) < 0.02  # 65,536 weights: six standard deviations are 0.014
    q.requires_grad_()
    nothing = scaled_dot_product_attention(q, k, ones, dropout_p=1.0)
    nothing.sum().backward()
    assert not nothing.any()
    assert not q.grad.any()  # type: ignore[union-attr]


def test_autocast_holds_as_for_torchs() -> None:
    q, k, v = leaves((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), dtype=torch.float32)
    mask = normal(5, 7).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        theirs = torch_sdpa(q, k, v.bfloat16(), mask)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-2)
    ours.sum().backward()
    assert (q.grad.dtype, mask.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(8)}, "query: must be a tensor of at least 2 dimensions"),
        ({"value": [[1.0]]}, "value: must be a tensor of at least 2 dimensions"),
        ({"dropout_p": 1.5}, "dropout_p: must be 0 to 1, not 1.5"),
        ({"key": torch.zeros(1, 2, 7, 8)}, "enable_gqa=True shares key heads"),
        (
            {"key": torch.zeros(1, 3, 7, 8), "value": torch.zeros(1, 3, 7, 8), "enable_gqa": True},
            "must divide query's 4",
        ),
        ({"key": torch.zeros(1, 4, 7, 8).half()}, "dtype"),
        ({"attn_mask": torch.ones(5, 6)}, "attn_mask"),
        ({"query": torch.nested.as_nested_tensor([torch.zeros(1, 2, 8)], layout=torch.jagged)}, "NestedTensor"),
    ],
    ids=str,
)
def test_what_is_not_valid_raises_a_value_error_and_torchs_runtime_error(change: dict[str, Any], message: str) -> None:
    given = {"query": torch.zeros(1, 4, 5, 8), "key": torch.zeros(1, 4, 7, 8), "value": torch.zeros(1, 4, 7, 8)}
    with pytest.raises(ProblemError, match=message) as raised:
        scaled_dot_product_attention(**given | change)
    assert isinstance(raised.value, RuntimeError)
    assert not {error.field for error in raised.value.errors} & {"q", "k", "v"}


@pytest.mark.skipif(DEVICE != "cpu", reason="the samples are made on the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_torchs_own_samples(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's samples for its operator tests pass, contiguous or not; with dropout, only shapes are compared."""
    # torch.testing._internal imports expecttest only for the names of its test cases.
    monkeypatch.setitem(sys.modules, "expecttest", types.ModuleType("expecttest"))
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operators = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
        strided = importlib.import_module("torch.testing._internal.common_utils").noncontiguous_like
    (operator,) = (one for one in operators if one.name == "nn.functional.scaled_dot_product_attention")
    tried = 0
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=True):
        how = dict(sample.kwargs)
        dropout = how.pop("dropout_p")
        plain = [t.detach() for t in (sample.input, *sample.args)]
        if (mask := how.pop("attn_mask", None)) is not None:
            plain.append(mask.detach())
        for given in (plain, [strided(t) for t in plain]):
            given = [t.detach().requires_grad_() for t in given]
            if dropout:
                o = scaled_dot_product_attention(*given, dropout_p=0.5, **how)
                assert o.shape == torch_sdpa(*given, **how).shape
                o.sum().backward()
                assert all(t.grad.isfinite().all() for t in given)
            else:
                hold(given, **how)
            tried += 1
    assert tried >= 2 * 25
    for wrong in operator.error_inputs("cpu") if operator.error_inputs_func else ():  # torch 2.13 has none
        with pytest.raises(ProblemError):
            scaled_dot_product_attention(
                wrong.sample_input.input, *wrong.sample_input.args, **wrong.sample_input.kwargs
            )


# Models that call the function


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Replace torch's function with ours, and return the list of its answers."""
    answers: list[Tensor] = []

    def counted(*given: Any, **how: Any) -> Tensor:
        answers.append(scaled_dot_product_attention(*given, **how))
        return answers[-1]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    return answers


def trained(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of `run` and the gradients of the model's parameters."""
    model.zero_grad()
    o = run(model)
    o.double().square().mean().backward()
    return o.detach(), {name: t.grad.clone() for name, t in model.named_parameters() if t.grad is not None}


def same(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def bert(**more: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return BertModel(BertConfig(vocab_size=50, attn_implementation="sdpa", **sizes), add_pooling_layer=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=4))


def with_padding(model: nn.Module) -> Tensor:
    tokens = torch.randint(1, 50, (3, 11), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, 7:] = 0
    o = model(input_ids=tokens, attention_mask=mask)[0]
    return torch.where(mask[..., None].bool(), o, 0)


def translated(model: nn.Module) -> Tensor:
    tokens = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    o: Tensor = model(input_ids=tokens, decoder_input_ids=tokens[:, :5]).logits
    return o


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], Tensor]]] = {
    "llama": (small_models.llama, with_padding),  # key heads shared by groups of query heads
    "gemma3": (small_models.gemma3, with_padding),  # windows
    "gpt2": (gpt2, with_padding),
    "bert": (bert, with_padding),  # not causal
    "t5": (small_models.t5, translated),  # a learned bias, which has a gradient
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_runs_and_trains_on_it(name: str, calls: list[Tensor]) -> None:
    pytest.importorskip("transformers")
    made, run = MODELS[name]
    torch.manual_seed(0)
    model = made().to(DEVICE).eval()
    model.set_attn_implementation("sdpa")
    actual = trained(model, run)
    assert len(calls) >= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", torch_sdpa)
        same(actual, trained(model, run))


def test_a_model_writes_the_same_tokens(calls: list[Tensor]) -> None:
    pytest.importorskip("transformers")
    model = small_models.llama().to(DEVICE)
    tokens = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert not calls
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)
    assert len(calls) == 2 * 8


@pytest.mark.parametrize("made", [
    lambda: nn.MultiheadAttention(32, 4, batch_first=True), lambda: nn.TransformerEncoderLayer(32, 4, 48, 0.0),
], ids=["MultiheadAttention", "TransformerEncoderLayer"])  # fmt: skip
def test_torchs_own_modules_run_and_train_on_it(made: Callable[[], nn.Module], calls: list[Tensor]) -> None:
    torch.manual_seed(0)
    model, x = made().to(DEVICE), normal(3, 9, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(9 if isinstance(model, nn.MultiheadAttention) else 3, DEVICE)

    def run(model: nn.Module) -> Tensor:
        if isinstance(model, nn.MultiheadAttention):
            o: Tensor = model(x, x, x, attn_mask=mask, need_weights=False)[0]
        else:
            o = model(x, src_mask=mask, is_causal=True)
        return o

    actual = trained(model, run)
    assert len(calls) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", torch_sdpa)
        same(actual, trained(model, run))


def test_torch_compile_sees_one_graph() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True) + scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    given = [normal(1, 4, 5, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(5, 5)]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), step(*given))
