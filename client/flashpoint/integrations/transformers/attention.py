"""The attention function that transformers calls. It sends keys and values, or uses those of a `RemoteCache`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashpoint._client.client import Client
from flashpoint.errors import invalid
from flashpoint.integrations.transformers.held import HeldTensor
from flashpoint.integrations.transformers.masks import held_mask
from flashpoint.torch import attention as remote
from flashpoint_contract import transformers as models

NAME = "remote_attention"


def register(client: Client, name: str = NAME) -> None:
    """Make `attn_implementation="remote_attention"` run on a server, for every model of this process.

    Args:
        client: Client of the server. A second call with the same name replaces it.
        name: Name of the implementation, which models take as `attn_implementation`.

    Raises:
        InvalidInputError: the name is one of transformers' own, or has another meaning there. Later, a model that is
            given the name also raises this error if its attention cannot be replaced. If only a part of its attention
            cannot be replaced, there is a warning.
    """

    def compute(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool,
        window: int | None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return o. With a `RemoteCache`, k and v are `HeldTensor`s, which stand for all tokens of the cache on the
        server, and the client of the cache makes the call.
        """
        if not isinstance(k, HeldTensor):
            return remote(q, k, v, client=client, **models.mask_options(q, k, mask, bias, causal), **options)
        if bias is not None:
            raise invalid("position_bias", "is not served over a RemoteCache: generate with transformers' own cache")
        if options.pop("return_lse", False):
            raise invalid("sinks", "by query are not served over a RemoteCache: generate with transformers' own cache")
        return k.update.attention(q, mask, causal, window, **options)

    models.register(name, compute, held_mask, invalid)
