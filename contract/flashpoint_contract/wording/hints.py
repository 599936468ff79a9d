"""Suggest a known name for an unknown one: a similar name, or the equivalent of a name in torch or flash-attn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from flashpoint_contract.options import OPTIONS
from flashpoint_contract.tensors import TENSORS

_ALIKE = 0.6  # minimum similarity of two names, by difflib
_LONGEST = 32  # names of more characters get no suggestion: the comparison would be slow
_MOST = 4  # names in one message that get suggestions: it may have thousands of names

# Our names, each with its equivalents in other libraries, in lower case: torch, flash-attn, xformers, FlashInfer, vLLM,
# transformers, ONNX.
_NAMED_ELSEWHERE = {
    "causal": "is_causal causal_mask",
    "q": "query queries",
    "k": "key keys",
    "v": "value values",
    "scale": "sm_scale softmax_scale scaling attn_scale",
    "dropout_p": "dropout p_dropout attn_dropout",
    "dropout_seed": "seed rng_state",
    "attn_mask": "mask attention_mask attn_bias bias position_bias",
    "window": "window_size sliding_window window_left",
    "softcap": "soft_cap logits_soft_cap logit_softcapping",
    "sinks": "s_aux sink learnable_sink",
    "alibi_slopes": "alibi",
    "cu_seqlens_k": "cu_seqlens_kv",
    "offset": "diagonal diagonal_offset q_offset query_offset position_offset cache_position",
    "q_lengths": "seqused_q",
    "kv_lengths": "seqused_k cache_seqlens seqlens_k",
    "block_table": "page_table block_tables",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "do": "dout grad_out grad_output",
    "o": "out output attn_output",
    "lse": "softmax_lse logsumexp",
    "return_lse": "return_softmax_lse return_attn_probs",
    "precision": "allow_tf32",
    "layout": "input_layout tensor_layout",
    "dq": "grad_query",
    "dk": "grad_key",
    "dv": "grad_value",
    "dattn_mask": "dbias",
}
_ELSEWHERE = {other: ours for ours, others in _NAMED_ELSEWHERE.items() for other in others.split()}

NAMES = (*TENSORS, *OPTIONS)


def meant(name: str, known: Iterable[str] = NAMES) -> str | None:
    """Return the name of `known` that the unknown `name` probably means; None if no name is similar."""
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
    """Yield each name with its `did_you_mean`, which is "" after the first `_MOST` names."""
    for count, name in enumerate(names):
        yield name, did_you_mean(name, known) if count < _MOST else ""


def how_to_install(extra: str) -> str:
    """Return a hint on how to install an extra, from a checkout or from the wheel."""
    return f"install it with: pip install '.[{extra}]' in a checkout, or pip install 'flashpoint-….whl[{extra}]'"
