"""Suggest the intended name for an unknown one: a similar name, or the name in torch, flash-attn and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from flashpoint_contract.options import OPTIONS
from flashpoint_contract.tensors import TENSORS

_ALIKE = 0.6  # minimum similarity, as difflib computes it
_LONGEST = 32  # maximum characters of a compared name: a caller may send longer ones
_MOST = 8  # maximum compared names in one message: a caller may send thousands

# Other libraries' names for ours, in lower case: torch, flash-attn, xformers, FlashInfer, vLLM, transformers, ONNX.
_ELSEWHERE = {
    "is_causal": "causal",
    "causal_mask": "causal",
    "query": "q",
    "queries": "q",
    "key": "k",
    "keys": "k",
    "value": "v",
    "values": "v",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "scaling": "scale",
    "attn_scale": "scale",
    "dropout": "dropout_p",
    "p_dropout": "dropout_p",
    "attn_dropout": "dropout_p",
    "seed": "dropout_seed",
    "rng_state": "dropout_seed",
    "mask": "attn_mask",
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "bias": "attn_mask",
    "position_bias": "attn_mask",
    "window_size": "window",
    "sliding_window": "window",
    "window_left": "window",
    "soft_cap": "softcap",
    "logits_soft_cap": "softcap",
    "logit_softcapping": "softcap",
    "s_aux": "sinks",
    "sink": "sinks",
    "learnable_sink": "sinks",
    "alibi": "alibi_slopes",
    "cu_seqlens_kv": "cu_seqlens_k",
    "diagonal": "offset",
    "diagonal_offset": "offset",
    "q_offset": "offset",
    "query_offset": "offset",
    "position_offset": "offset",
    "cache_position": "offset",
    "seqused_q": "q_lengths",
    "seqused_k": "kv_lengths",
    "cache_seqlens": "kv_lengths",
    "seqlens_k": "kv_lengths",
    "page_table": "block_table",
    "block_tables": "block_table",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "dout": "do",
    "grad_out": "do",
    "grad_output": "do",
    "out": "o",
    "output": "o",
    "attn_output": "o",
    "softmax_lse": "lse",
    "logsumexp": "lse",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "allow_tf32": "precision",
    "input_layout": "layout",
    "tensor_layout": "layout",
    "grad_query": "dq",
    "grad_key": "dk",
    "grad_value": "dv",
    "dbias": "dattn_mask",
}

NAMES = (*TENSORS, *OPTIONS)


def meant(name: str, known: Iterable[str] = NAMES) -> str | None:
    """Return the `known` name that an unknown one probably means; None if there is none."""
    if len(name) > _LONGEST:
        return None
    names, lower = list(known), name.lower().replace("-", "_")
    if (ours := _ELSEWHERE.get(lower)) in names:
        return ours
    alike = {known.lower().replace("-", "_"): known for known in names}
    near = get_close_matches(lower, alike, 1, _ALIKE)
    return alike[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str] = NAMES) -> str:
    """Return the end of a message about an unknown name: `; did you mean causal?`, or ""."""
    near = meant(name, known)
    return f"; did you mean {near}?" if near else ""


def each_meant(names: Iterable[str], known: Iterable[str] = NAMES) -> Iterator[tuple[str, str]]:
    """Yield each name with its `did_you_mean`, which is "" for all but the first few."""
    for count, name in enumerate(names):
        yield name, did_you_mean(name, known) if count < _MOST else ""


def how_to_install(extra: str) -> str:
    """Return the hint how to install an extra, from a checkout or from the wheel."""
    return f"install it with: pip install '.[{extra}]' in a checkout, or pip install 'flashpoint-….whl[{extra}]'"
