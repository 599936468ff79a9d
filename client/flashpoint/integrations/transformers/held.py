"""Stand-ins for the keys and values of a `RemoteCache`. Only the attention of `register` can use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from flashpoint.errors import invalid

# transformers and models read these attributes.
_READ = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "size", "dim", "numel", "__len__"}


class Given(Protocol):
    """The methods of `layers.Update` (new keys and values of a layer) that are called through a `HeldTensor`."""

    def attention(self, q: Tensor, mask: Tensor | None, causal: bool, window: int | None, **options: Any) -> Tensor:
        """Return o (B,Hq,Sq,Dv) of q (B,Hq,Sq,D) over all tokens of the layer. Raises FlashpointError."""

    def misused(self) -> bool:
        """Forget the unfinished forward, because other code computes with this update. The caller then raises an error.

        Return whether the model's configuration names the attention of `register`.
        """


class HeldTensor(Tensor):
    """A stand-in for new keys or values of a layer. Its shape can be read; computing with it raises an error."""

    update: Given

    @classmethod
    def of(cls, tensor: Tensor, update: Given) -> HeldTensor:
        made = Tensor._make_subclass(cls, tensor)
        made.update = update
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow reading sizes and moving to another device. Raises InvalidInputError for everything else."""
        getter = function.__name__ == "__get__"
        name = getattr(function, "__self__", function).__name__ if getter else function.__name__
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, HeldTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _READ:
                return function(*args, **(kwargs or {}))
            if name == "to" and given:  # models on several devices move keys that several layers share
                return cls.of(function(*args, **(kwargs or {})), given[0].update)
        served = [one.update.misused() for one in given]
        if any(served):  # for example, DeepSeek's MLA computes with the cached latent vectors before its attention
            raise invalid(
                "past_key_values",
                f"cannot be a RemoteCache: this model computes with what it caches before its attention ({name}), and "
                "a server holds that. Generate with transformers' own cache; the attention is then served too",
            )
        raise invalid(
            "attn_implementation",
            f"must be one of flashpoint's register(), because a server holds the keys ({name} needs them here). Call "
            "register(client) and model.set_attn_implementation('remote_attention')",
        )
