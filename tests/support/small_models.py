"""Small language models with random weights that take milliseconds per token; their tokens depend on every key."""

import torch

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
WINDOW = 6
ALTERNATING = {
    "sliding_window": WINDOW, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return _made(LlamaForCausalLM, LlamaConfig(**SIZES | {"num_hidden_layers": 2} | more))


def gemma2(**more):
    """Return a model with windows and a softcap."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    settings = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}
    return _made(Gemma2ForCausalLM, Gemma2Config(**SIZES | ALTERNATING | settings | more))


def gemma3(**more):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _made(Gemma3ForCausalLM, Gemma3TextConfig(**SIZES | ALTERNATING | {"query_pre_attn_scalar": 8} | more))


def gpt_oss(**more):
    """Return a model with sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    settings = {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default"}}
    settings["rope_parameters"]["rope_theta"] = 10000.0
    return _made(GptOssForCausalLM, GptOssConfig(**SIZES | ALTERNATING | settings | more))


def gemma4(**more):
    """Return a model with two head dimensions, whose last layers use the keys and values of earlier layers."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    settings = {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 50, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    return _made(Gemma4ForCausalLM, Gemma4TextConfig(**SIZES | ALTERNATING | settings | more))


def t5(**more):
    """Return an encoder and decoder whose layers add a learned bias by distance to the scores."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    rest = {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return _made(T5ForConditionalGeneration, T5Config(**sizes | rest | more))


MODELS = {made.__name__: made for made in (llama, gemma3, gpt_oss, gemma4)}


def _made(kind, config):
    config._attn_implementation = "eager"
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" not in name:
                weights.normal_(0, 0.3, generator=generator)
    return model
