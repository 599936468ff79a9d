"""The attention function that transformers calls. It sends keys and values, or uses those of a `RemoteCache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flashpoint._client import Client
from flashpoint.errors import invalid
from flashpoint.integrations.transformers.held import HeldTensor
from flashpoint.integrations.transformers.masks import biased_mask, held_mask
from flashpoint.torch import attention as remote

NAME = "remote_attention"


def register(client: Client, name: str = NAME) -> None:
    """Make `attn_implementation="remote_attention"` run on a server, for every model of this process.

    Args:
        client: Client of the server. A second call with the same name replaces it.
        name: Name of the implementation, which models take as `attn_implementation`.
    """

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        cache: object = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return o (B,Sq,Hq,D) for query (B,Hq,Sq,D), key and value (B,Hk,Sk,D); and None in place of the weights.

        attention_mask: (B,1,Sq,Sk), bool or float. position_bias: (B|1,Hq,Sq,Sk), added to the scores (T5); it gets a
        gradient. Hq may be a multiple of Hk. The server draws the seed of dropout. Without a mask, `is_causal` means
        the upper-left triangle, as in torch's SDPA, except for a single query. With a `RemoteCache`, key and value
        stand for all tokens that it holds, and its client makes the call.
        """
        if cache is not None:
            raise invalid("cache", "is not served: the model needs another attn_implementation")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(key, HeldTensor):
            if position_bias is not None:
                raise invalid(
                    "position_bias", "is not served over a RemoteCache: generate with transformers' own cache"
                )
            o = key.update.attention(
                query, attention_mask, bool(causal), sliding_window,
                scale=scaling, dropout_p=dropout, softcap=softcap or 0.0, sinks=s_aux,
            )  # fmt: skip
            return o.transpose(1, 2).contiguous(), None
        o = remote(
            query,
            key,
            value,
            client=client,
            attn_mask=biased_mask(attention_mask, position_bias),
            causal=bool(causal and attention_mask is None and query.shape[2] > 1),
            causal_alignment="top_left",
            scale=scaling,
            dropout_p=dropout,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, held_mask)
