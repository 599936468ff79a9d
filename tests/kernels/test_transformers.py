"""Models of transformers train in bfloat16 and float32 and generate with our kernels, or raise a clear error."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import ProblemError
from tests.conftest import DEVICE
from tests.support import small_models

pytest.importorskip("transformers", reason="install the extra: pip install '.[dev]'")

NAME = "local_attention"
TOKENS = torch.randint(1, 50, (2, 24), generator=torch.Generator().manual_seed(0))
VALID = torch.ones_like(TOKENS)
VALID[1, 19:] = 0  # padding; `generate` needs it on the left


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    from flashpoint_kernels.transformers import register  # imported only here, because the import takes seconds

    register()


def gpt_oss() -> Any:
    """Return gpt-oss with both experts active, so that rounding cannot select others; eager experts accept float64."""
    model = small_models.gpt_oss(num_experts_per_tok=2)
    model.set_experts_implementation("eager")
    return model


FAMILIES = {
    "llama": small_models.llama,  # grouped heads
    "gemma2": small_models.gemma2,  # windows and softcap
    "gemma3": small_models.gemma3,
    "gpt_oss": gpt_oss,  # sinks
    "t5": small_models.t5,  # a position bias with a gradient
}


def trained(model: Any, attention: str, dtype: torch.dtype, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """Return the logits of valid tokens, and the gradient of each parameter, in float64."""
    model.to(dtype).train()
    model.set_attn_implementation(attention)
    model.zero_grad()
    tokens, mask = tokens.to(DEVICE), VALID.to(DEVICE)
    out = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    out.loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    logits = out.logits if model.config.is_encoder_decoder else out.logits[mask.bool()]
    return {**gradients, "logits": logits.detach().double()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gemma2", "gpt_oss") else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize(
    ("dtype", "true_dtype", "limit", "of_each", "of_all"),
    [(torch.bfloat16, torch.float32, 0.1, 2, 1.25), (torch.float32, torch.float64, 1e-5, 3, 1.5)],
    ids=str,
)
def test_training_is_as_exact_as_eager(
    dtype: torch.dtype, true_dtype: torch.dtype, limit: float, of_each: float, of_all: float, name: str
) -> None:
    """Training is about as exact as with eager attention; both are compared with eager in a wider dtype."""
    model = FAMILIES[name]().to(DEVICE)
    if name in ("gpt_oss", "t5"):  # large weights make bfloat16 useless there
        for each, weights in model.named_parameters():
            weights.detach().mul_(1 if "norm" in each else 0.5)
    model.to(dtype)
    squares: dict[str, list[Tensor]] = {}  # per batch, sums of squares: our error, eager's error, true values
    for seed in range(8):
        tokens = torch.randint(1, 50, TOKENS.shape, generator=torch.Generator().manual_seed(seed))
        ours, eager = (trained(model, attention, dtype, tokens) for attention in (NAME, "eager"))
        exact = trained(model, "eager", true_dtype, tokens)
        assert ours.keys() == eager.keys() == exact.keys()
        for each, true in exact.items():
            parts = torch.stack([t.square().sum() for t in (ours[each] - true, eager[each] - true, true)])
            squares.setdefault(each, []).append(parts)
    assert any({"gpt_oss": "sinks", "t5": "relative_attention_bias"}.get(name, "q_proj") in each for each in squares)
    relative = {}
    for each, sums in squares.items():
        *both, true = torch.stack(sums).sum(0).sqrt()
        relative[each] = error, of_eager = torch.stack(both) / true
        assert error <= of_each * of_eager, each
    error, of_eager = torch.stack(list(relative.values())).square().mean(0).sqrt()
    assert error <= of_all * of_eager
    assert error < limit


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generation_with_padding_writes_the_tokens_of_eager(name: str, how: dict[str, Any]) -> None:
    model = FAMILIES[name]().to(DEVICE)
    rows = slice(1) if "prompt_lookup_num_tokens" in how else slice(2)  # assisted generation takes one sequence
    results = []
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        results.append(model.generate(
            TOKENS[rows].to(DEVICE), attention_mask=VALID.flip(1)[rows].to(DEVICE), max_new_tokens=10,
            min_new_tokens=10, do_sample=False, **how,
        ))  # fmt: skip
    assert torch.equal(*results)
    assert results[0].unique().numel() > 2


def test_dropout_draws_anew_and_repeats_with_gradient_checkpointing() -> None:
    model = small_models.llama(attention_dropout=0.5).to(DEVICE)
    first, second = (trained(model, NAME, torch.float32) for _ in range(2))
    assert not torch.equal(first["logits"], second["logits"])
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        results.append(trained(model, NAME, torch.float32))
    for each, true in results[0].items():
        torch.testing.assert_close(results[1][each], true, rtol=1e-4, atol=1e-7)


def test_a_model_that_computes_its_attention_itself_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ProblemError, match="BloomModel computes BloomAttention itself"):
        BloomForCausalLM(BloomConfig(**sizes, attn_implementation=NAME))


@pytest.mark.parametrize("name", ["flashpoint", "sdpa", "eager", "paged|mine", "", 3])
def test_names_that_mean_something_else_to_transformers_are_refused(name: Any) -> None:
    from flashpoint_kernels.transformers import register

    with pytest.raises(ProblemError, match="name: is"):
        register(name)


def test_scores_are_not_in_memory() -> None:
    """Without padding and windows there is no mask, and no kernel makes a matrix of 4,096 by 4,096 scores."""
    model = small_models.llama(num_hidden_layers=1, max_position_embeddings=4096).to(DEVICE).eval()
    model.set_attn_implementation(NAME)
    gc.collect()
    largest = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest.append(made.untyped_storage().nbytes())
            return made

    with torch.no_grad(), Sizes():
        model(torch.randint(1, 50, (1, 4096)).to(DEVICE), logits_to_keep=1)
    assert 0 < max(largest) < 4096 * 4096  # bytes; a mask of booleans has a byte for each score
