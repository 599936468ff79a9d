"""Models of Hugging Face transformers whose attention is served, by `register`, agree with eager attention."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from tests.support import small_models

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def register(*arguments):
    from flashpoint.integrations.transformers import register  # this import takes seconds, so not at collection

    register(*arguments)


def llama(attention, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention, **more)).eval()


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def models(client):
    register(client, "remote_attention_of_llama")
    return llama("eager"), llama("remote_attention_of_llama")


TOKENS = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", [0, 5])
@torch.no_grad()
def test_a_decoder_with_grouped_heads_agrees_with_eager(models, padding):
    mask = torch.ones_like(TOKENS)
    mask[1, :padding] = 0
    eager, served = (model(TOKENS, attention_mask=mask).logits for model in models)
    valid = mask.bool()
    assert (served[valid] - eager[valid]).abs().max() < 1e-5


@torch.no_grad()
def test_generation_with_a_cache_agrees_with_eager(models):
    eager, served = (model.generate(TOKENS, max_new_tokens=6, do_sample=False, min_new_tokens=6) for model in models)
    assert eager.tolist() == served.tolist()


def test_a_decoders_gradients_agree_with_eager(models):
    grads = []
    for model in models:
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    eager, served = grads
    for name, grad in eager.items():
        assert (served[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize("kind", ["gemma3", "gemma3_with_softcap", "gpt_oss", "t5"])
def test_answers_and_gradients_of_other_families_agree_with_eager(client, kind):
    """These families have windows, softcap, sinks, or T5's position bias, which has a gradient. One row is padded."""
    name, _, softcap = kind.partition("_with_")
    model = getattr(small_models, name)(**({"attn_logit_softcapping": 5.0} if softcap else {})).train()
    mask = torch.ones_like(TOKENS)
    mask[1, 9:] = 0
    register(client, "remote_attention_of_families")
    results = {}
    for attention in ("eager", "remote_attention_of_families"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        out = model(TOKENS, attention_mask=mask, labels=TOKENS.masked_fill(mask == 0, -100))
        out.loss.backward()
        logits = out.logits if name == "t5" else out.logits[mask.bool()]  # logits at padding have no meaning
        results[attention] = (
            logits.detach(),
            {each: p.grad for each, p in model.named_parameters() if p.grad is not None},
        )
    (eager, eager_grads), (served, grads) = results.values()
    assert (served - eager).abs().max() <= 1e-5 * eager.abs().max()
    assert grads.keys() == eager_grads.keys()
    assert not softcap or model.config.attn_logit_softcapping == 5.0
    assert name != "t5" or sum("relative_attention_bias" in each and grads[each].any().item() for each in grads) == 2
    for each, grad in eager_grads.items():
        error, largest = (grads[each] - grad).abs().max(), grad.abs().max()
        assert error <= 1e-5, each
        assert error <= 5e-5 * largest, each  # wide, because cancellation in float32 sums loses digits


@torch.no_grad()
def test_t5_generates_the_tokens_of_eager(client):
    register(client, "remote_attention_of_t5")
    model = small_models.t5()
    eager = model.generate(TOKENS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    model.set_attn_implementation("remote_attention_of_t5")
    assert model.generate(TOKENS, max_new_tokens=6, min_new_tokens=6, do_sample=False).tolist() == eager.tolist()


def test_training_with_dropout_runs_on_the_servers_dropout(client):
    register(client, "remote_attention_with_dropout")
    model = llama("remote_attention_with_dropout", attention_dropout=0.5)
    outputs = [model.train()(TOKENS, labels=TOKENS).loss for _ in range(2)]
    assert outputs[0] != outputs[1]
    outputs[0].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_server_that_is_gone_is_an_error_and_not_another_attention():
    with flashpoint.Client("http://127.0.0.1:9", retries=0) as gone:
        register(gone, "remote_attention_of_nobody")
        with pytest.raises(flashpoint.ConnectionFailedError):
            llama("remote_attention_of_nobody")(TOKENS)


def test_what_is_not_served_is_refused(client):
    from transformers import AttentionInterface

    register(client)
    attention = AttentionInterface()["remote_attention"]
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(flashpoint.InvalidInputError, match="cache"):
        attention(torch.nn.Module(), q, q, q, None, cache=object())
