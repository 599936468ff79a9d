"""A KV cache for transformers that stores keys and values on a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from flashpoint._client.caches import Cache as ServerCache
from flashpoint._client.client import Client
from flashpoint._derivatives.autograd import autocast
from flashpoint.errors import CacheError, FlashpointError, invalid
from flashpoint.integrations.transformers.history import Forward, History, Step
from flashpoint.integrations.transformers.layers import RemoteLayer, Update, layers_of
from flashpoint.integrations.transformers.masks import HeldMask, packed_mask


class RemoteCache(Cache):
    """The KV cache of a model, which a server holds.

        with RemoteCache(client, model.config) as cache:
            model.generate(**inputs, past_key_values=cache)

    The model's attention must be that of `register`. Every mode of `generate` works: greedy, sampling, beams, batches
    with padding on the left, assisted decoding, prefill in chunks, and a conversation that goes on with the same cache.
    The server has a cache for each sequence; they are made at the first forward, for its batch and its dtype. Sequences
    with equal tokens, such as the beams of a prompt, share a cache until their tokens differ: then it is forked. Forks
    share the memory of their common tokens, and the server reads these once for all of them.

    Use it in a `with`, or call `close`, to free the server's memory at once. When the server has lost it, CacheError is
    raised, and the cache is empty: call `generate` again with all tokens.

    Args:
        client: Client of the server.
        config: The model's configuration, `model.config`.
        ttl_s: Time to live in seconds since the last use. None is the server's own (600).
        rewind: Number of tokens that `crop` and assisted decoding can remove from layers with a sliding window. From
            other layers they can remove all tokens.

    Raises:
        InvalidInputError: an argument is not valid, or the model has layers with other state than keys and values.
    """

    def __init__(self, client: Client, config: Any, *, ttl_s: float | None = None, rewind: int = 512) -> None:
        if not isinstance(client, Client):
            raise invalid("client", f"must be a flashpoint.Client, not {type(client).__name__}")
        if type(rewind) is not int or rewind < 0:
            raise invalid("rewind", f"is {rewind!r}, and must be a number of tokens, 0 or more")
        super().__init__(layers=layers_of(self, config))
        self.client, self.config, self.ttl_s, self.rewind = client, config, ttl_s, rewind
        self._own = {layer.number for layer in self.layers if isinstance(layer, RemoteLayer)}
        self._forget()

    def _forget(self) -> None:
        self.history = History()
        # (heads, key dimension, value dimension) of a layer -> the cache of each sequence. All caches are on one
        # engine. Sequences with equal tokens have the same cache.
        self._caches: dict[tuple[int, int, int], list[ServerCache]] = {}
        self._last_start = 0  # highest position at which a forward began; the server keeps `keep` tokens before it
        self.drop_forward()

    def drop_forward(self) -> None:
        """Forget the unfinished forward: the next forward writes at the same positions."""
        self._forward: Forward | None = None
        self._written: set[int] = set()  # layers that this forward has written
        self._given: Update | None = None  # the update whose attention has not run yet

    # transformers calls the following methods, up to `close`.

    def seen(self, layer: int) -> int:
        """Return the number of tokens that `layer` has."""
        under_way = self._forward is not None and layer in self._written
        return self.history.length + (self._forward.step.count if under_way and self._forward else 0)

    @property
    def batch_size(self) -> int:
        """Return the number of sequences; -1 while the cache is empty."""
        return self.history.batch or len(next(iter(self._caches.values()), ())) or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and the tokens of a forward that did not end. Nothing is sent.

        `tokens_to_remove` is minus their number, as transformers passes it; 0 removes only an unfinished forward.
        Raises InvalidInputError if a layer with a sliding window has freed tokens that would be needed.
        """
        if tokens_to_remove > 0:
            raise invalid("tokens_to_remove", f"is {tokens_to_remove}: give a negative number of tokens")
        length = max(0, self.history.length + tokens_to_remove)
        if 0 < length < self._last_start - self.rewind and any(self.is_sliding):
            raise invalid(
                "tokens_to_remove",
                f"is {tokens_to_remove}, but layers with a sliding window can go back to position "
                f"{self._last_start - self.rewind} only. Make the RemoteCache with a larger rewind than {self.rewind}",
            )
        self.drop_forward()
        self.history = self.history.cut(length)
        if not length:
            self.reset()

    def reset(self) -> None:
        """Forget all tokens, and free the server's memory."""
        caches = self._distinct()
        self._forget()
        if caches:
            self.client.delete_caches(caches)

    def _distinct(self) -> list[ServerCache]:
        return list(dict.fromkeys(cache for rows in self._caches.values() for cache in rows))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence n by sequence `beam_idx[n]`, as in beam search. `beam_idx` is (B,), int64."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences at `indices`: their numbers (n,), or a mask (B,)."""
        places = torch.arange(max(0, self.batch_size), dtype=torch.int64, device="cpu")
        self._take(places[torch.as_tensor(indices, dtype=None, device="cpu")].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, one after the other."""
        self._take([row for row in range(self.batch_size) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Do nothing: the last `rewind` tokens can be removed at any time."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteCache:
        """Return a copy, which shares the server's memory until a write to either of them."""
        other = RemoteCache(self.client, self.config, ttl_s=self.ttl_s, rewind=self.rewind)
        memo[id(self)] = other
        if self._caches:
            caches = self._distinct()
            copies = dict(zip(caches, self._fork(caches), strict=True))
            other._caches = {sizes: [copies[cache] for cache in rows] for sizes, rows in self._caches.items()}
        other.history, other._last_start = self.history, self._last_start
        return other

    def close(self) -> None:
        """Free the server's memory. The cache is then empty, and may be used again."""
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(FlashpointError) if kind else nullcontext():  # do not hide an error from inside the `with`
            self.close()

    def _take(self, sources: Sequence[int]) -> None:
        """Replace each sequence n by sequence sources[n]. Sequences with the same source share its caches."""
        before = self._distinct()
        self._caches = {sizes: [rows[source] for source in sources] for sizes, rows in self._caches.items()}
        still_used = set(self._distinct())
        if free := [cache for cache in before if cache not in still_used]:
            self.client.delete_caches(free)
        self.history = self.history.take(sources)

    def _fork(self, caches: list[ServerCache]) -> list[ServerCache]:
        try:
            return self.client.fork_caches(caches)
        except CacheError as error:
            if _is_lost(error):
                raise self._lost(error) from error
            raise

    # During a forward, each layer calls `take_update` and then `attention`.

    def take_update(self, layer: int, k: Tensor, v: Tensor) -> Update:
        """Return an `Update` with new keys `k` (B, Hk, S, D) and values `v` (B, Hk, S, Dv) of `layer`.

        Raises InvalidInputError.
        """
        given, self._given = self._given, None
        if given is not None:
            problem = (
                f"has keys of layer {given.layer} that no attention used. This model cannot use a RemoteCache, or its "
                "last forward stopped: then call cache.crop(0)"
            )
        elif torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            problem = "has no gradients: use torch.no_grad(), or no RemoteCache"
        elif self.batch_size not in (-1, len(k)):
            problem = (
                f"holds {self.batch_size} sequences, and the model has {len(k)}. Call "
                "cache.batch_repeat_interleave first, or cache.reset() to begin anew"
            )
        elif layer in self._written:
            missing = ", ".join(map(str, sorted(self._own - self._written)))
            problem = f"has nothing of layers {missing} from the last forward. If that stopped, call cache.crop(0)"
        else:
            self._given = Update(self, layer, k, v)
            return self._given
        raise invalid("past_key_values", problem)

    def attention(
        self, update: Update, q: Tensor, mask: Tensor | None, causal: bool, window: int | None, options: dict[str, Any]
    ) -> Tensor:
        """Return o (B, Hq, Sq, Dv) of `q` (B, Hq, Sq, D) over all tokens of a layer.

        The first call of a forward writes the new keys and values of `update`. `mask` is (B, 1, Sq, Sk), bool or float.
        Without a mask, `causal` and `window` apply; `window` is the number of tokens that a query sees (None: no
        limit). `options` are those of `Client.attention`. Raises the errors of `flashpoint.errors`: CacheError if the
        server has lost a cache.
        """
        self._given = None
        try:
            if torch.is_grad_enabled() and q.requires_grad:
                raise invalid("past_key_values", "has no gradients: use torch.no_grad(), or no RemoteCache")
            if isinstance(mask, HeldMask) and mask.cache is not self:
                raise invalid("attention_mask", "was made for another cache")
            forward = update.forward or self._begun(mask, update.k)
            o = self._attend(update, forward, q, mask, causal, window, options)
        except BaseException as error:
            self.drop_forward()
            # A layer that uses the keys of an earlier layer may fail after all layers have been written. The history
            # then already contains this forward: undo it.
            if update.forward is not None:
                self.history = update.forward.before
            if _is_lost(error):
                raise self._lost(error) from error
            raise
        if update.forward is None:
            update.forward = forward
            self._written.add(update.layer)
            if self._written == self._own:
                self.history = forward.after
                self.drop_forward()
        return o

    def _begun(self, mask: Tensor | None, k: Tensor) -> Forward:
        """Return the unfinished forward, or begin one. The first layer's mask defines the padding."""
        if self._forward is None:
            step = self.history.step(mask.padding if isinstance(mask, HeldMask) else None, k.shape[2])
            self._forward = Forward(self.history, step, self.history.cached_lengths(len(k)))
            self._last_start = max(self._last_start, self.history.length)
        return self._forward

    def _attend(
        self, update: Update, forward: Forward, q: Tensor, mask: Tensor | None, causal: bool, window: int | None,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Send the call of one layer, and return o (B,Hq,Sq,Dv). Padding tokens are not sent, and their o is 0."""
        step = forward.step.last(q.shape[2])
        if step.lengths is not None and not step.lengths.any():
            return update.v.new_zeros(*q.shape[:3], update.v.shape[3])
        if isinstance(mask, HeldMask) and mask.plain and not (step.hides or (step.gaps and mask.window is not None)):
            causal, window, mask = True, mask.window, None
        if mask is None:
            options |= {"causal": causal, "window": (-1 if window is None else window - 1, -1)}
        else:
            options["attn_mask"] = packed_mask(mask, forward.after.columns, step.order)
        k = v = None
        if update.forward is None:
            k, v = _packed(update.k, forward.step), _packed(update.v, forward.step)
            options["at"] = forward.at
        if step.lengths is not None:
            options["q_lengths"] = step.lengths
        (q,) = autocast(q)
        call = {"q": _packed(q, step), "k": k, "v": v, **options}
        numbers, count = self._distinct_sequences(update, call)
        caches = self._caches[_sizes(update)]
        if count < len(numbers):
            some = [numbers.index(n) for n in range(count)]
            caches = [caches[n] for n in some]
            call |= {name: _selected(t, some) for name, t in call.items() if _per_sequence(name, t, len(numbers))}
        o: Tensor = self.client.attention(caches=caches, layer=update.layer, **call)
        if count < len(numbers):
            o = o[numbers]
        if step.order is None:
            return o
        whole = o.new_zeros(*q.shape[:3], o.shape[3])
        return whole.scatter_(2, _spread(step.order, o), o)

    def _distinct_sequences(self, update: Update, call: dict[str, Any]) -> tuple[list[int], int]:
        """Return a number for each sequence of the batch, and how many different numbers there are.

        Sequences with the same cache and equal tensors in `call` have the same number: the server computes them once.
        If sequences with one cache write different tokens, the cache is forked first. The first call makes the caches.
        """
        sizes, batch = _sizes(update), len(update.k)
        rows: Sequence[ServerCache | None] | None = self._caches.get(sizes) or next(iter(self._caches.values()), None)
        tensors = [value for name, value in call.items() if _per_sequence(name, value, batch)]
        firsts: list[int] = []  # the first sequence with each number
        numbers: list[int] = []
        by_cache: dict[ServerCache | None, list[int]] = {}  # the numbers of the sequences that use each cache
        for n, cache in enumerate(rows or [None] * batch):
            candidates = by_cache.setdefault(cache, [])
            alike = (i for i in candidates if all(_equal(t[n], t[firsts[i]]) for t in tensors))
            number = next(alike, len(firsts))
            if number == len(firsts):
                firsts.append(n)
                candidates.append(number)
            numbers.append(number)
        if call["k"] is not None and rows is not None:
            self._part(numbers, firsts)
        if sizes not in self._caches:
            made = self._made(update, len(firsts))
            self._caches[sizes] = [made[number] for number in numbers]
        return numbers, len(firsts)

    def _part(self, numbers: Sequence[int], firsts: Sequence[int]) -> None:
        """Fork caches so that each number of `_distinct_sequences` has its own cache."""
        rows = next(iter(self._caches.values()))
        shared = [n for place, n in enumerate(firsts) if rows[n] in [rows[other] for other in firsts[:place]]]
        if not shared:
            return
        copies = iter(self._fork([rows[n] for rows in self._caches.values() for n in shared]))
        for sizes, rows in self._caches.items():
            copies_by_number = {numbers[n]: next(copies) for n in shared}
            self._caches[sizes] = [
                copies_by_number.get(number, cache) for number, cache in zip(numbers, rows, strict=True)
            ]

    def _made(self, update: Update, count: int) -> list[ServerCache]:
        """Make `count` caches on the server, with the sizes of the layer of `update`."""
        kv_heads, head_dim, value_dim = _sizes(update)
        windows = [layer.window if isinstance(layer, RemoteLayer) else None for layer in self.layers]
        keep = [None if window is None else max(1, window - 1 + self.rewind) for window in windows]
        beside = next((rows[0] for rows in self._caches.values()), None)
        return self.client.caches(
            count, layers=len(keep), kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, keep=keep,
            dtype=str(update.k.dtype).removeprefix("torch."), ttl_s=self.ttl_s, beside=beside,
        )  # fmt: skip

    def _lost(self, error: CacheError) -> CacheError:
        """Empty this cache after the server has lost its caches, and return the error to raise."""
        self._forget()
        return CacheError(
            "the server does not have this model's cache any more: it expired, or its engine restarted. The "
            "RemoteCache is empty now. Call generate again with all tokens; a larger ttl_s keeps it longer",
            status=error.status, code=error.code, request_id=error.request_id, errors=error.errors,
        )  # fmt: skip


def _is_lost(error: BaseException) -> TypeGuard[CacheError]:
    return isinstance(error, CacheError) and error.code in ("cache_lost", "cache_not_found")


def _sizes(update: Update) -> tuple[int, int, int]:
    """Return the heads, the key dimension and the value dimension of a layer."""
    return update.k.shape[1], update.k.shape[3], update.v.shape[3]


def _per_sequence(name: str, value: Any, batch: int) -> bool:
    """Return whether an argument of `Client.attention` has values for each sequence of a batch."""
    if name == "attn_mask":
        return len(value) == batch
    return name in ("q", "k", "v", "at", "q_lengths") and value is not None


def _selected(value: Any, some: list[int]) -> Any:
    return value[some] if isinstance(value, Tensor) else [value[n] for n in some]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _packed(t: Tensor, step: Step) -> Tensor:
    """Return a tensor (B,H,S,D) with each sequence's valid tokens first."""
    return t if step.order is None else t.gather(2, _spread(step.order, t))


def _spread(order: Tensor, t: Tensor) -> Tensor:
    """Return the positions `order` (B, n) as an index of dimension 2 of the tensor `t` (B,H,S,D)."""
    return order.to(t.device)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
