"""transformers models with served attention: gradient checkpointing, second derivatives, autocast, and MLA."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from tests.support import small_models

NAME = "remote_attention_by_the_rules"
TOKENS = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def client(server):
    from flashpoint.integrations.transformers import register

    with flashpoint.Client(server.url) as client:
        register(client, NAME)
        yield client


def served(**more):
    model = small_models.llama(**more)
    model.set_attn_implementation(NAME)
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_repeats_the_dropout(client, reentrant):
    results = []
    for checkpointing in (False, True):
        model = served(attention_dropout=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        model(TOKENS, labels=TOKENS).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-4, atol=1e-7)


def test_a_second_derivative_of_a_model_raises(client):
    model = served()
    x = torch.zeros(1, 4, model.config.hidden_size).normal_().requires_grad_()
    (dx,) = torch.autograd.grad(model(inputs_embeds=x).logits.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second-order gradients of attention are not available"):
        dx.norm().backward()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_model_trains_under_autocast(client, kind):
    """Training under autocast works although rotary embeddings make q and k float32, while v is bfloat16."""
    results = {}
    for attention in ("sdpa", NAME):
        model = getattr(small_models, kind)().train()
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(TOKENS, labels=TOKENS)
        out.loss.backward()
        results[attention] = out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    (eager, eager_grads), (loss, grads) = results.values()
    torch.testing.assert_close(loss, eager, rtol=2e-2, atol=2e-2)
    assert {n: g.dtype for n, g in grads.items()} == {n: g.dtype for n, g in eager_grads.items()}
    assert all(g.isfinite().all() for g in grads.values())


@torch.no_grad()
def test_a_remote_cache_under_autocast(client):
    from flashpoint.integrations.transformers import RemoteCache

    model, expected = served(), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for count in range(5, 8):
            expected.append(model(TOKENS[:, :count], use_cache=False).logits[:, -1])
        with RemoteCache(client, model.config) as cache:
            actual = [model(TOKENS[:, :5], past_key_values=cache).logits[:, -1]]
            actual += [model(TOKENS[:, n : n + 1], past_key_values=cache).logits[:, -1] for n in (5, 6)]
            model.generate(TOKENS, past_key_values=RemoteCache(client, model.config), max_new_tokens=2).tolist()
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


@torch.no_grad()
def test_mla_is_served_without_a_remote_cache_and_says_so_with_one(client):
    """DeepSeek's MLA caches latent vectors and computes keys from them, so a `RemoteCache` cannot work for it."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from flashpoint.integrations.transformers import RemoteCache

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(
        **{name: n for name, n in small_models.SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
        num_hidden_layers=2, num_key_value_heads=4, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
    )).eval()  # fmt: skip
    eager = model.generate(TOKENS, max_new_tokens=3, do_sample=False)
    with RemoteCache(client, model.config) as cache:
        with pytest.raises(flashpoint.InvalidInputError, match="attn_implementation: must be one of"):
            model.generate(TOKENS, past_key_values=cache, max_new_tokens=3)
        model.set_attn_implementation(NAME)
        assert torch.equal(model.generate(TOKENS, max_new_tokens=3, do_sample=False), eager)
        with pytest.raises(flashpoint.InvalidInputError, match=r"past_key_values: .*transformers' own cache"):
            model.generate(TOKENS, past_key_values=cache, max_new_tokens=3)
