"""`register` replaces the attention of Hugging Face transformers, for the client and the attention library.

A model gets what its own `eager` attention would get: masks that are never left out, and every argument. An argument
that is not applied here is an error. This package needs transformers 5; nothing else in `flashpoint_contract` does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Protocol

from transformers import AttentionInterface, AttentionMaskInterface

from flashpoint_contract.transformers.checks import OURS, Invalid, install, no_weights, relies_on_is_causal
from flashpoint_contract.transformers.masks import LazyMask, lazy_mask

__all__ = ["LazyMask", "Solve", "lazy_mask", "mask_options", "register", "registered_by"]

Tensor = Any  # torch.Tensor


class Solve(Protocol):
    """Computes o (B,Hq,Sq,Dv) of q (B,Hq,Sq,D), k and v (B,Hk,Sk,D), with the options `scale`, `softcap` and so on.

    mask: (B,1,Sq,Sk), bool, float or a `LazyMask`. bias: (B|1,Hq,Sq,Sk), added to the scores (T5). Without a mask,
    `causal` means that query i sees keys 0 to i, as in torch's SDPA; but a single query sees all keys. With the option
    `return_lse` it returns (o, lse), lse (B,Hq,Sq).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool,
        window: int | None, **options: Any,
    ) -> Any: ...  # fmt: skip


_RESERVED = re.compile(r"^(eager|paged)$|flash|sdpa|flex_attention|[|/:]")  # names with a meaning in transformers

# Arguments that models pass on to every attention function, and that none of transformers' own uses: outputs to record,
# arguments of the model's call that its masks and hidden states already contain, and switches of FlashAttention.
_WITHOUT_EFFECT = {
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
    "num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "position_ids", "cache_position",
    "token_type_ids", "mm_token_type_ids", "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw",
    "image_sizes", "input_features", "seq_idx", "deterministic", "max_length_q", "max_length_k", "cu_seq_lens_q",
    "cu_seq_lens_k",
}  # fmt: skip


def register(name: str, compute: Solve, make_mask: Callable[..., Any], invalid: Invalid) -> None:
    """Make `attn_implementation=name` run `compute`, for every model of this process.

    Args:
        name: Name of the implementation. A second call with it replaces the first.
        compute: Computes the attention.
        make_mask: Makes the masks, as `lazy_mask` does.
        invalid: Makes the error for an argument, and for models whose attention cannot be replaced.
    """
    if not isinstance(name, str) or not name or _RESERVED.search(name):
        raise invalid(
            "name",
            f"is {name!r}, and must not be one of transformers' own, or contain flash, sdpa, flex_attention, | or /",
        )

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, sinks: Tensor | None = None,
        sliding_window: int | None = None, indices: Tensor | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Return o (B,Sq,Hq,D) of query (B,Hq,Sq,D), key and value (B,Hk,Sk,D); and None in place of the weights."""
        _refuse_others(module, others, attention_mask, invalid)
        if s_aux is not None and sinks is not None:
            raise invalid("sinks", "and s_aux are the same, and only one of them is taken")
        sinks = s_aux if sinks is None else sinks
        if is_causal is None:
            kind: Any = type(module)
            is_causal = getattr(module, "is_causal", True) and relies_on_is_causal(kind)
        causal = bool(is_causal)
        mask = attention_mask
        if indices is not None:
            mask = _selected(mask, indices, causal, query.shape[2], key.shape[2])
        options = {"scale": scaling, "dropout_p": dropout if module.training else 0.0, "softcap": softcap or 0.0}
        if sinks is None or sinks.ndim == 1:
            o = compute(query, key, value, mask, position_bias, causal, sliding_window, sinks=sinks, **options)
        else:  # a sink for each query (B,Hq,Sq,1): it takes its share of the softmax's sum
            o, lse = compute(
                query, key, value, mask, position_bias, causal, sliding_window, sinks=None, return_lse=True, **options
            )
            o = o * (lse[..., None] - sinks).sigmoid().to(o.dtype)
        return o.transpose(1, 2).contiguous(), None

    if not OURS:
        install()
    OURS[name] = invalid
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)


def _refuse_others(module: Any, others: dict[str, Any], mask: Tensor | None, invalid: Invalid) -> None:
    """Raise an error for an argument that is given and not applied, and for one that asks for weights."""
    model = type(module).__name__
    for name, value in others.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise invalid(
                name,
                f"is an argument of {model} that this attention does not apply. Use another attn_implementation for "
                "this model, such as 'eager'",
            )
    if others.get("output_attentions"):
        raise no_weights(invalid)
    starts = others.get("cu_seq_lens_q")
    if starts is not None and len(starts) > 2 and not _separates(mask, starts):
        raise invalid(
            "cu_seq_lens_q",
            "says that the batch has several sequences in one row, which the mask does not separate. Give "
            "position_ids that begin at 0 in each sequence, and no attention_mask",
        )


def _separates(mask: Tensor | None, starts: Tensor) -> bool:
    """Return whether no query at `starts` sees the key before it. A row of the batch has several sequences."""
    if mask is None:
        return False
    first = starts[1:-1].long()
    seen = mask.allowed() if isinstance(mask, LazyMask) else mask
    seen = seen[..., first, first - 1]
    return not bool((seen >= 0 if seen.dtype.is_floating_point else seen).any())


def _selected(mask: Tensor | None, indices: Tensor, causal: bool, queries: int, keys: int) -> Tensor:
    """Return `mask` without the keys that are not among `indices` (B,Sq,n) of a query. Negative indices are no keys."""
    width = keys if mask is None else mask.shape[-1]
    indices = indices.long()
    chosen = indices.new_zeros((*indices.shape[:2], width + 1)).bool()
    chosen = chosen.scatter(-1, indices.where(indices >= 0, width), True)[:, None, :, :width]
    if isinstance(mask, LazyMask):
        mask = mask.allowed()
    if mask is None:
        return chosen.tril() if causal and queries > 1 else chosen
    return mask.masked_fill(~chosen, -math.inf) if mask.dtype.is_floating_point else mask & chosen


def mask_options(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool) -> dict[str, Any]:
    """Return attention options equivalent to the arguments of `Solve`."""
    if isinstance(mask, LazyMask):
        causal = mask.causal and mask.fits(q, k)
        mask = None if causal else mask.allowed()
    else:
        causal = causal and mask is None
    return {
        "attn_mask": _biased(mask, bias),
        "causal": causal and q.shape[2] > 1,
        "causal_alignment": "top_left",
    }


def _biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Add `bias` (B|1,H,Sq,Sk) to `mask` (B,1,Sq,Sk), bool or float. Return a float mask; without a bias, `mask`.

    A bias of zeros is left out: T5 passes it in layers without a bias of their own.
    """
    if bias is None or not (bias.requires_grad or bias.any()):
        return mask
    if mask is None:
        return bias
    return bias + mask if mask.dtype.is_floating_point else bias.where(mask, -math.inf)


def registered_by(invalid: Invalid, config: Any) -> bool:
    """Return whether a model of this configuration uses an attention that `register` was called for with `invalid`."""
    return OURS.get(getattr(config.get_text_config(decoder=True), "_attn_implementation", None) or "") is invalid
