"""Differentiable attention for JAX, computed by a server. It works under `jit`, `grad` and `vmap`.

    o = flashpoint.jax.attention(q, k, v, client=client, causal=True)

The forward calls `/attention`, the backward `/attention/grad` with the forward's inputs, `o` and `lse`. So the server
does not compute the forward again, and without `save` it stores nothing. A compiled program calls the client in a host
callback. A `vmap` sends one request for all its elements where it can.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from numpy.typing import NDArray

from flashpoint._calls.keywords import Sending, Settled
from flashpoint._calls.service import SavedAttention, checked
from flashpoint._client import saved as _saved
from flashpoint._client.client import Client
from flashpoint._derivatives.vmapped import batch_shape, fold, single
from flashpoint.errors import CacheError, all_invalid, invalid
from flashpoint_contract.options import GRADS, Grad, is_integer
from flashpoint_contract.saved import ID_LENGTH
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import INDEX_TENSORS, REQUIRED, TENSORS, refusals
from flashpoint_contract.wording.docstrings import documented

Array: TypeAlias = jax.Array | NDArray[Any]
Arrays: TypeAlias = dict[str, jax.Array]

_GRADS: dict[str, Grad] = {name[1:]: name for name in GRADS}
_TOKEN = "saved"  # name of the array with the id of a saved forward: JAX keeps only arrays for the backward
_AT_ONCE = 16  # maximum concurrent requests of a `vmap`: the server can join them in a launch; its queue stays short


@documented
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    client: Client,
    attn_mask: Array | None = None,
    block_mask: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_lengths: Array | Sequence[int] | None = None,
    kv_lengths: Array | Sequence[int] | None = None,
    offset: Array | Sequence[int] | int | None = None,
    cu_seqlens_q: Array | Sequence[int] | None = None,
    cu_seqlens_k: Array | Sequence[int] | None = None,
    dropout_seed: Array | int | None = None,
    return_lse: bool = False,
    save: bool = False,
    **options: Unpack[Settled],
) -> Any:
    """Return attention as `Client.attention` does, differentiable in JAX: under `jit`, `grad` and `vmap`.

    q, k, v, a float `attn_mask` and `sinks` get gradients, through o and lse. Tensors are JAX's or NumPy's, answers
    JAX's. Options are constants of a compiled program, except for `dropout_seed`, which may be an array. `timeout` and
    `priority` hold for the backward's call too.

    Args:
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`; other layouts and ranks as `Client.attention`.
        client: The client that sends the call from the host.
        save: Let the server keep the forward until its backward has run, or for its time to live; the backward then
            sends `do` alone. Under `vmap`, or if the server has no memory for the forward or has lost it, the backward
            sends all tensors.
        return_lse: Return (o, lse) in place of o. Default: False.

    Returns:
        o (B, Hq, Sq, Dv) in q's dtype. With `return_lse` (o, lse), lse float32 (B, Hq, Sq).

    Raises:
        FlashpointError: the errors of `flashpoint.errors`; a compiled program has them in the text of JAX's own error.
            With dropout, `dropout_seed` is needed, because JAX may run a call again. A second derivative raises
            RuntimeError, `jax.jvp` TypeError.
    """
    given = {
        "q": q, "k": k, "v": v, "attn_mask": attn_mask, "block_mask": block_mask, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "q_lengths": q_lengths, "kv_lengths": kv_lengths, "offset": offset,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    tensors = {name: _array(name, t) for name, t in given.items() if t is not None or name in REQUIRED["forward"]}
    if unknown := sorted(options.keys() - Settled.__annotations__.keys()):
        reasons = dict(refusals("jax", unknown))
        raise all_invalid((name, reasons.get(name, "is not taken by this call")) for name in unknown)
    sending = {name: value for name, value in options.items() if name in Sending.__annotations__}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if name not in sending}
    if isinstance(dropout_seed, jax.Array):
        if dropout_seed.ndim or not jnp.issubdtype(dropout_seed.dtype, jnp.integer):
            raise invalid("dropout_seed", "must be one integer")
        tensors["dropout_seed"] = dropout_seed
    else:
        chosen["dropout_seed"] = dropout_seed
    settled = checked(AttentionOptions, chosen)
    if settled.dropout_p and dropout_seed is None:
        raise invalid("dropout_seed", "must be given: JAX may run a call again, which must drop the same")
    _check_ranks(tensors, settled.layout)
    if type(save) is not bool:
        raise invalid("save", "must be True or False")
    if not isinstance(client, Client):
        raise invalid("client", "must be a Client")
    call = _Call(client, settled, tuple(sorted(sending.items())), tensors["q"].ndim, save=save)
    o, lse = _attention(call, tensors)
    return (o, lse) if return_lse else o


def _array(name: str, value: Any) -> jax.Array:
    listed = isinstance(value, (list, tuple)) and name in INDEX_TENSORS
    number = name in INDEX_TENSORS and TENSORS[name].may_be_number
    if not (isinstance(value, (jax.Array, np.ndarray)) or listed or (number and is_integer(value))):
        kinds = f"{'an integer, ' if number else ''}{'a list, ' if name in INDEX_TENSORS else ''}"
        raise invalid(name, f"must be {kinds}a JAX or NumPy array, not {type(value).__name__}")
    try:
        return jnp.asarray(value, int if isinstance(value, (list, tuple)) and not value else None)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(name, f"is no array of JAX's: {error}") from None


def _check_ranks(tensors: Arrays, layout: str) -> None:
    """Check the ranks, which the shapes of the answers depend on. The server checks everything else."""
    rank, ranks = tensors["q"].ndim, (3,) if layout == "thd" else (2, 3, 4)
    if rank not in ranks:
        raise invalid("q", f"must have {' or '.join(map(str, ranks))} dimensions, not {rank}")
    for name in ("k", "v"):
        if tensors[name].ndim != rank:
            raise invalid(name, f"must have as many dimensions as q, {rank}, not {tensors[name].ndim}")


class _Answer(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _Call:
    """A call from a host callback: the forward, or the backward if `grads` is not empty. Equal calls compile once."""

    client: Client
    options: AttentionOptions
    sending: tuple[tuple[str, Any], ...]
    rank: int  # number of q's dimensions, without those that a vmap adds in front
    grads: tuple[Grad, ...] = ()
    save: bool = False
    saving: bool = False  # a differentiated forward with `save`: it also returns a token, which the backward receives

    def answers(self, tensors: Mapping[str, Any], lead: int = 0) -> dict[str, _Answer]:
        """Return the shape and dtype of each answer, without the `lead` axes that a vmap adds in front. Each key is the
        name of a tensor that has the same axes as the answer.
        """
        if self.grads:
            like = {name[1:]: tensors[name[1:]] for name in self.grads}
            return {name: _Answer(t.shape[lead:], t.dtype) for name, t in like.items()}
        q, v = tensors["q"], tensors["v"]
        rows = list(q.shape[lead:-1])
        o = _Answer((*rows, v.shape[-1]), q.dtype)
        if self.options.layout == "thd" or (self.options.layout == "bshd" and self.rank == 4):
            rows[-2:] = reversed(rows[-2:])  # lse has the axis of heads first
        lse = _Answer(tuple(rows), np.dtype(np.float32))
        token = {_TOKEN: _Answer((ID_LENGTH,), np.dtype(np.uint8))} if self.saving else {}
        return {"o": o, "lse": lse, **token}

    def __call__(self, tensors: Arrays) -> tuple[NDArray[Any], ...]:
        # `np.asarray` is the only JAX code in this host callback: other JAX calls in it could deadlock.
        arrays = {name: np.asarray(t) for name, t in tensors.items()}
        token = arrays.pop(_TOKEN, None)
        mapped = arrays["q"].ndim > self.rank
        if self.saving:
            if not mapped:
                return self._save(arrays)
            results = dataclasses.replace(self, saving=False)._answer(arrays)
            return (*results, np.zeros((*results[0].shape[: arrays["q"].ndim - self.rank], ID_LENGTH), np.uint8))
        if token is not None and not mapped and (saved := token.tobytes().rstrip(b"\0").decode()):
            try:
                return self._of_saved(saved, arrays)
            except CacheError:  # the saved forward expired, its engine restarted, or JAX runs the backward again
                pass
        return self._answer(arrays)

    def _save(self, arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        saved = self.client.attention(**self._keywords(arrays), return_lse=True, save=True)
        assert isinstance(saved, SavedAttention)
        token = np.zeros(ID_LENGTH, np.uint8)
        written = np.frombuffer((saved.saved or "").encode(), np.uint8)
        token[: len(written)] = written
        return saved.o, saved.lse, token

    def _of_saved(self, saved: str, arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """Return the gradients of a saved forward, and free it."""
        sending: dict[str, Any] = {name: value for name, value in self.sending if name != "request_id"}
        gradients: tuple[NDArray[Any], ...] = self.client.attention_grad(
            arrays["do"], dlse=arrays.get("dlse"), saved=saved, grads=self.grads, **sending
        )
        _saved.Lease(self.client, saved).release()
        return gradients

    def _answer(self, arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        if not (lead := arrays["q"].ndim - self.rank):
            return self._send(arrays)
        wanted = self.answers(arrays, lead)
        # Dropout's random numbers depend on the place of a sequence in its request, so folding would change them.
        folded = None if self.options.dropout_p else fold(arrays, lead, self.options.layout, self.grads)
        if folded:
            results = zip(wanted.items(), self._send(folded.tensors), strict=True)
            return tuple(folded.unfold(name, answer, like.shape) for (name, like), answer in results)
        batch = batch_shape(arrays, lead)
        answers = tuple(np.empty((*batch, *like.shape), like.dtype) for like in wanted.values())

        def send(index: tuple[int, ...]) -> None:
            for whole, answer in zip(answers, self._send(single(arrays, index)), strict=True):
                whole[index] = answer

        self.client._ready_to_call()  # before threads start
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            deque(pool.map(send, np.ndindex(batch)), maxlen=0)
        return answers

    def _send(self, arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        keywords = self._keywords(arrays)
        if self.grads:
            keywords.pop("request_id", None)  # the id was for the forward's call
            answer = self.client.attention_grad(**keywords, grads=self.grads)
        else:
            answer = self.client.attention(**keywords, return_lse=True)
        results: tuple[NDArray[Any], ...] = answer
        return results

    def _keywords(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        return {**self.options.model_dump(exclude_defaults=True), **dict(self.sending), **arrays}


def _ask(call: _Call, tensors: Arrays) -> tuple[jax.Array, ...]:
    """Return the answers of `call`. Concrete arrays on one device need no callback, so errors keep their class."""
    if any(isinstance(t, jax.core.Tracer) or not isinstance(t.device, jax.Device) for t in tensors.values()):
        answers = tuple(jax.ShapeDtypeStruct(*answer) for answer in call.answers(tensors).values())  # type: ignore[no-untyped-call]
        results: tuple[jax.Array, ...] = jax.pure_callback(call, answers, tensors, vmap_method="expand_dims")
        return results
    return tuple(jax.device_put(t, tensors["q"].device) for t in call(tensors))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, tensors: Arrays) -> tuple[jax.Array, ...]:
    """Return (o, lse); a `saving` call also returns its token."""
    return _ask(call, tensors)


def _forward(call: _Call, primals: dict[str, Any]) -> tuple[Any, Any]:
    needed = [name for name, primal in primals.items() if primal.perturbed]
    for name in needed:
        if name not in _GRADS:
            raise invalid(name, "has no gradient: wrap it in jax.lax.stop_gradient")
    tensors = {name: primal.value for name, primal in primals.items()}
    results = _attention(dataclasses.replace(call, saving=call.save), tensors)
    outputs = dict(zip(("o", "lse", _TOKEN), results, strict=False))
    answer = results if call.saving else results[:2]
    return answer, (tensors, outputs, dict.fromkeys(needed))  # dict keys are not traced by jit


def _backward(call: _Call, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    tensors, outputs, needed = residuals
    do, dlse, *_ = cotangents
    o = outputs["o"]
    sent = {**tensors, **outputs, "do": jnp.zeros_like(o) if isinstance(do, SymbolicZero) else jnp.asarray(do)}
    if not isinstance(dlse, SymbolicZero):
        sent["dlse"] = jnp.asarray(dlse)
    gradients = _gradients(dataclasses.replace(call, grads=tuple(_GRADS[name] for name in needed)), sent)
    return ({**dict.fromkeys(tensors), **dict(zip(needed, gradients, strict=True))},)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: _Call, tensors: Arrays) -> tuple[jax.Array, ...]:
    return _ask(call, tensors)


@_gradients.defjvp
def _second_order(call: _Call, primals: Any, tangents: Any) -> Any:
    raise RuntimeError(
        "second-order gradients of attention are not available over HTTP: use flashpoint_kernels, in torch"
    )
