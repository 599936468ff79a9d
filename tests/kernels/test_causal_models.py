"""Language models of transformers answer as with eager attention, or refuse: prefill, generate, padding, training …"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashpoint_kernels import ProblemError

pytest.importorskip("transformers", reason="install the extra: pip install '.[dev]'")

NAME = "local_attention"
PAGE = Path(__file__).parents[2] / "docs/reference/transformers-models.md"
SLICES = 8
# Each has something that `sdpa` of transformers does not compute, or reads the name of the implementation.
SAMPLE = {
    "deepseek_v32": ("prefill", "generate", "left padding"),  # selects keys by `indices`
    "hy_v4": ("prefill",),  # that, and sinks
    "axk2": ("prefill",),
    "glm_moe_dsa": ("prefill",),
    "mistral_large4": ("prefill",),
    "deepseek_v4": ("prefill", "packed positions"),  # appends keys, and their mask
    "inkling2_text": ("prefill", "training"),  # a sink of each query
    "gemma4_text": ("logits_to_keep", "static cache"),  # selects queries from the mask
    "bigbird_pegasus": ("prefill", "generate"),  # is_causal says False in its decoder
    "nllb-moe (encoder and decoder)": ("prefill", "left padding"),
    "gemma2": ("prefill", "packed positions"),  # softcap
    "gpt_oss": ("prefill", "packed positions"),  # sinks
    "t5gemma (encoder and decoder)": ("prefill",),
    "switch_transformers (encoder and decoder)": ("prefill",),
    "speech_to_text": ("prefill",),
    "gemma4": ("training",),  # passes the arguments of its call on
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    from flashpoint_kernels.transformers import register

    register()


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    from tests.support import causal_walk

    return causal_walk.kinds()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", SAMPLE)
def test_models_with_more_than_plain_attention_answer_as_with_eager(kinds: dict[str, Any], model: str) -> None:
    from tests.support import causal_walk

    made = causal_walk.made(*kinds[model]())
    found = {each: causal_walk.outcome(made, NAME, each, (ProblemError,)) for each in SAMPLE[model]}
    assert found == dict.fromkeys(SAMPLE[model], "equal")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(SLICES))
def test_every_model_is_equal_or_refused_as_the_page_says(kinds: dict[str, Any], number: int) -> None:
    import transformers

    from tests.support import causal_walk

    rows = {
        model: causal_walk.row(kinds[model], NAME, (ProblemError,))
        for place, model in enumerate(kinds) if place % SLICES == number
    }  # fmt: skip
    assert not re.findall("WRONG|FAILS", str(rows)), rows
    page = PAGE.read_text()
    if f"transformers {transformers.__version__} " in page:
        missing = set(causal_walk.table(rows).splitlines()) - set(page.splitlines())
        assert not missing, "run python -m tests.support.causal_walk docs/reference/transformers-models.md"


@pytest.fixture
def own() -> Iterator[Any]:
    """Return a function that makes a small Llama whose layers call the attention with more arguments."""
    from transformers.models.llama import modeling_llama

    from tests.support import small_models

    before = modeling_llama.LlamaAttention.forward

    def made(**more: Any) -> Any:
        def forward(self: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
            return before(self, hidden_states, *args, **keywords, **more)

        modeling_llama.LlamaAttention.forward = forward
        model = small_models.llama(num_hidden_layers=1)
        model.set_attn_implementation(NAME)
        return model

    yield made
    modeling_llama.LlamaAttention.forward = before


TOKENS = torch.arange(1, 9)[None]


@torch.no_grad()
def test_an_argument_that_is_not_known_is_refused_by_name_unless_it_is_none(own: Any) -> None:
    with pytest.raises(
        ProblemError, match="block_table: is an argument of LlamaAttention that this attention does not"
    ):
        own(block_table=torch.zeros(1))(TOKENS)


@torch.no_grad()
def test_an_argument_that_is_none_is_no_argument(own: Any) -> None:
    own(block_table=None)(TOKENS)


@torch.no_grad()
def test_several_sequences_in_a_row_need_a_mask_that_separates_them() -> None:
    from tests.support import small_models

    model = small_models.llama()
    positions = torch.cat((torch.arange(3), torch.arange(5)))[None]
    true = model(TOKENS, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(NAME)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "cu_seq_lens_k": torch.tensor([0, 3, 8])}
    found = model(TOKENS, position_ids=positions, use_cache=False, **lengths).logits
    torch.testing.assert_close(found, true)
    with pytest.raises(ProblemError, match=r"cu_seq_lens_q: says that .* several sequences in one row"):
        model(TOKENS, use_cache=False, **lengths)


@torch.no_grad()
def test_weights_that_a_call_asks_for_are_refused() -> None:
    from tests.support import small_models

    for made in (small_models.llama, small_models.gemma3):
        model = made()
        assert len(model(TOKENS, output_attentions=True).attentions) == model.config.num_hidden_layers
        model.set_attn_implementation(NAME)
        with pytest.raises(ProblemError, match="output_attentions: is True, and this attention does not make"):
            model(TOKENS, output_attentions=True)
        with pytest.raises(ProblemError, match="output_attentions"):
            model.generate(TOKENS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        model.set_attn_implementation("eager")
        assert model(TOKENS, output_attentions=True).attentions[0].shape[-1] == 8


SOURCE = """
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from torch import nn

def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    weights = query @ key.transpose(2, 3) * {factor}
    weights = weights if attention_mask is None else weights + attention_mask
    return (weights.softmax(-1) @ value).transpose(1, 2), weights

class OwnAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.temperature, self.is_causal = config, 3.0, True

    def forward(self, x, mask=None):
        call = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return call(self, x, x, x, mask, scaling=0.5)[0]

class OwnModel(PreTrainedModel):
    config_class = PreTrainedConfig
    _supports_sdpa = {sdpa}

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention(config)
        self.post_init()

    def forward(self, x, mask=None):
        return self.attention(x, mask)
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a model of somebody's own."""
    import importlib

    def imported(name: str, **values: str) -> Any:
        (tmp_path / f"{name}.py").write_text(SOURCE.format(**values))
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(name)

    return imported


def test_a_model_without_sdpa_whose_attention_does_more_is_refused(written: Any) -> None:
    from transformers import PreTrainedConfig

    module = written("own_model_with_temperature", factor="module.temperature", sdpa="False")
    with pytest.raises(
        ProblemError, match=r"OwnModel does not support 'sdpa', .* uses module.temperature, which is not"
    ):
        module.OwnModel(PreTrainedConfig(attn_implementation=NAME))


@pytest.mark.parametrize("sdpa", [True, False])
def test_without_a_mask_a_model_without_sdpa_sees_all_keys_as_in_eager(written: Any, sdpa: bool) -> None:
    from transformers import PreTrainedConfig

    module = written(f"own_model_{sdpa}", factor="scaling", sdpa=str(sdpa))
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    models = [module.OwnModel(PreTrainedConfig(attn_implementation=name)) for name in ("eager", NAME)]
    made = [model(x) for model in models]
    assert torch.allclose(*made, atol=1e-5) == (not sdpa)  # with `sdpa`, is_causal stands for the mask
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min)
    torch.testing.assert_close(*[model(x, mask) for model in models])


def test_dropout_of_a_module_in_evaluation_is_none(written: Any) -> None:
    from transformers import AttentionInterface

    module = nn.Module().eval()
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    made = [AttentionInterface()[NAME](module, q, q, q, None, dropout=dropout)[0] for dropout in (0.0, 0.9)]
    torch.testing.assert_close(*made)
