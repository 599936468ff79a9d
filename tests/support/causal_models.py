"""Build each causal language model of the installed transformers small, with random weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

VOCABULARY = 50
LAYERS = 4  # at most, if so many kinds of layers exist
LARGEST = 40_000_000  # parameters

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "hidden_dim", "dim_model"), 32),
    **dict.fromkeys(("attention_hidden_size", "hidden_size_global", "input_size", "cross_attention_hidden_size",
                     "out_hidden_size", "expert_dim", "output_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size", "d_ff", "ffn_hidden_size", "n_inner",
                     "encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size", "intermediate_size_mlp",
                     "shared_intermediate_size", "shared_experts_intermediate_size", "dim_ff", "block_ff_dim",
                     "expert_ffn_hidden_size", "dense_intermediate_size", "moe_shared_expert_intermediate_size",
                     "ffn_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "attention_heads", "swa_num_attention_heads", "num_encoder_heads",
                     "num_decoder_attention_heads", "num_encoder_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "kv_channels", "attention_head_dim", "dim_head", "d_head",
                     "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "swa_v_head_dim"), 8),
    "qk_head_dim": 16, "index_head_dim": 16, "global_head_dim": 16, "rotary_dim": 4, "query_pre_attn_scalar": 8,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "d_rel"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "index_topk", "window_size",
                     "sliding_window_size", "floor_scale", "rel_extent"), 6),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts",
                     "n_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "topk_group", "moe_top_k", "moe_k",
                     "n_group", "num_selected_experts", "top_k_experts"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions",
                     "max_source_positions", "model_max_length"), 128),
    **dict.fromkeys(("hidden_size_per_layer_input", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim",
                     "mamba_d_state", "mamba_d_head", "mamba_dt_rank", "state_size", "time_step_rank", "mamba_head_dim",
                     "ssm_state_size", "mamba_headdim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "lru_width": 32, "num_kv_shared_layers": 2, "mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 2,
    "mamba_n_groups": 1, "n_groups": 1, "mamba_ngroups": 1, "mamba_expand": 2,
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_decoder_layers", "num_encoder_layers")  # fmt: skip


# Arguments of a configuration that the names of its default values do not give.
_MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"topk_group": 1, "n_group": 2, "topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "glm5_next_text": {"index_kpool": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_expert_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 50,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 5]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


class NotSmallError(Exception):
    """A model that cannot be built small. The message says why."""


def small_config(config: Any, **more: Any) -> Any:
    """Return a configuration of the same class as `config`, with small sizes, and `more` in place of its values."""
    return type(config)(**{**_small(config), **_MORE.get(config.model_type, {}), **more})


def _small(config: Any) -> dict[str, Any]:
    values = {name.removeprefix("_"): value for name, value in vars(config).items() if name in _fields(config)}
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), None)
    kept = _layers(values, layers)
    latent = "qk_nope_head_dim" in values  # DeepSeek's attention has a key of each head
    small: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            small[name] = small_config(value)
        elif name in _LAYERS and isinstance(value, int):
            small[name] = len(kept)
        elif isinstance(value, (list, tuple)) and layers and len(value) == layers:
            small[name] = type(value)(value[layer] for layer in kept)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = 0 if name == "pad_token_id" else min(value, VOCABULARY - 1)
        elif name in ("head_dim", "num_key_value_heads") and value is None:
            small[name] = _SIZES[name]
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = _SIZES["num_attention_heads" if latent and name == "num_key_value_heads" else name]
        elif isinstance(value, float) and ("drop" in name or name == "router_jitter_noise"):
            small[name] = 0.0
    return small


def _fields(config: Any) -> Iterable[str]:
    return [name for name in vars(config) if not name.startswith("__")]


def _layers(values: dict[str, Any], layers: int | None) -> list[int]:
    """Return the numbers of the layers to keep: the first two, and the first of each kind."""
    if not layers:
        return [0, 1]
    lists = [value for value in values.values() if isinstance(value, (list, tuple)) and len(value) == layers]
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kinds.setdefault(repr([each[layer] for each in lists]), layer)
    kept = sorted(kinds.values())[:LAYERS]
    kept = kept if len(kept) > 1 else [0, min(1, layers - 1)]
    return kept * 2 if "num_kv_shared_layers" in values else kept


def build(kind: Any, config: Any) -> Any:
    """Return a model of class `kind` in evaluation mode, with eager attention. Raises NotSmallError."""
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(each.numel() for each in kind(config).parameters())
    if count > LARGEST:
        raise NotSmallError(f"{count:,} parameters")
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.is_floating_point() and "norm" not in name and weights.ndim > 1:
                weights.normal_(0, 0.2, generator=generator)
            elif "sink" in name:
                weights.normal_(0, 1, generator=generator)
    return model
