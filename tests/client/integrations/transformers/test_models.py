"""Models with more than plain attention answer with `remote_attention` as with `eager`, or refuse by name."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from flashpoint.integrations.transformers import RemoteCache, register
from tests.support import causal_walk, small_models

NAME = "remote_attention_of_models"
SAMPLE = {
    "deepseek_v32": ("prefill", "left padding"),  # selects keys by `indices`
    "deepseek_v4": ("prefill",),  # appends keys, and their mask
    "inkling2_text": ("training",),  # a sink of each query
    "gemma4_text": ("logits_to_keep",),  # selects queries from the mask
    "nllb-moe (encoder and decoder)": ("prefill",),  # is_causal says False in its decoder
    "gpt_oss": ("packed positions",),
}


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        register(client, NAME)
        yield client


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=[] if "deepseek" in each else pytest.mark.slow) for each in SAMPLE]
)
def test_models_answer_as_with_eager(client, model):
    made = causal_walk.made(*causal_walk.kinds()[model]())
    found = {each: causal_walk.outcome(made, NAME, each, (flashpoint.InvalidInputError,)) for each in SAMPLE[model]}
    assert found == dict.fromkeys(SAMPLE[model], "equal")


@torch.no_grad()
def test_queries_that_a_model_selects_see_their_keys_in_a_remote_cache(client):
    """Gemma 4's last layers, which use the keys of earlier ones, compute the queries of `logits_to_keep` alone."""
    model = small_models.gemma4()
    tokens = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    true = model(tokens).logits[:, -3:]
    model.set_attn_implementation(NAME)
    with RemoteCache(client, model.config) as cache:
        found = model(tokens, past_key_values=cache, logits_to_keep=3).logits
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_that_a_call_asks_for_are_refused(client):
    model = small_models.llama()
    model.set_attn_implementation(NAME)
    with pytest.raises(flashpoint.InvalidInputError, match="output_attentions: is True, and this attention does not"):
        model(torch.ones(1, 3, dtype=torch.long), output_attentions=True)
