"""The layers of a `RemoteCache`, with the interface that transformers needs, and the updates of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from flashpoint._derivatives.autograd import autocast
from flashpoint.errors import invalid
from flashpoint.integrations.transformers.held import HeldTensor
from flashpoint.integrations.transformers.history import Forward
from flashpoint.integrations.transformers.masks import LengthInCache
from flashpoint_contract.transformers import registered_by


class Owner(Protocol):
    """The interface of the `RemoteCache` that owns a layer."""

    config: Any

    def seen(self, layer: int) -> int:
        """Return the number of tokens of a layer, as the model counts them."""

    def take_update(self, layer: int, k: Tensor, v: Tensor) -> Update:
        """Return an `Update` with a layer's new keys and values. Raises InvalidInputError."""

    def attention(
        self, update: Update, q: Tensor, mask: Tensor | None, causal: bool, window: int | None, options: dict[str, Any]
    ) -> Tensor:
        """See `RemoteCache.attention`."""

    def drop_forward(self) -> None:
        """Forget the unfinished forward: the next forward writes at the same positions."""


class RemoteLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a `RemoteCache`, with the interface that transformers needs."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Owner, number: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.number, self.window = cache, number, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the attention of the first `Update` makes the caches on the server."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return stand-ins for the new keys and values. The layer's attention uses them next."""
        key_states, value_states = autocast(key_states, value_states)
        update = self.cache.take_update(self.number, key_states, value_states)
        return HeldTensor.of(key_states, update), HeldTensor.of(value_states, update)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of key positions of a mask for `query_length` queries, and the first of these positions."""
        return LengthInCache(self.get_seq_length() + query_length, self.cache), 0

    def get_seq_length(self) -> int:
        return self.cache.seen(self.number)

    def get_max_length(self) -> int:
        return -1


@dataclass(eq=False)
class Update:
    """New keys (B,Hk,S,D) and values (B,Hk,S,Dv) of a layer. `forward` is set after the server has stored them."""

    cache: Owner
    layer: int
    k: Tensor
    v: Tensor
    forward: Forward | None = None

    def attention(self, q: Tensor, mask: Tensor | None, causal: bool, window: int | None, **options: Any) -> Tensor:
        """Return o of q, as `RemoteCache.attention` does."""
        return self.cache.attention(self, q, mask, causal, window, options)

    def misused(self) -> bool:
        self.cache.drop_forward()
        return registered_by(invalid, self.cache.config)


def layers_of(cache: Owner, config: Any) -> list[Any]:
    """Return a layer for each layer of the cache that transformers makes for `config`. Raises InvalidInputError for a
    model that a `RemoteCache` cannot serve.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise invalid("config", "is an encoder-decoder's, whose cross-attention a RemoteCache does not hold")
    layers: list[Any] = []
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if isinstance(layer, DummyLayer):
            layers.append(layer)
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(RemoteLayer(cache, number, getattr(layer, "sliding_window", None)))
        else:
            raise invalid(
                "config", f"has layer {number} with state other than keys and values ({type(layer).__name__}), which "
                "a RemoteCache does not hold",
            )  # fmt: skip
    return layers
