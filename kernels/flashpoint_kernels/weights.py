"""How much attention keys receive: `key_weights` sums over all queries, `attention_weights` has rows of single ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from flashpoint_contract.options import OPTIONS, Options, ProblemError, is_integer, number_of
from flashpoint_contract.wording.docstrings import documented
from flashpoint_kernels.functional import OfKeys, checked, of_sequences, scale_tensor
from flashpoint_kernels.operators import weights
from flashpoint_kernels.operators.torch_rules import autocast, overridable

_TAKEN = OfKeys.__annotations__


@overridable
@documented
def key_weights(
    q: Tensor, k: Tensor, *, lse: Tensor | None = None, **keywords: Unpack[OfKeys]
) -> Tensor | list[Tensor]:
    """Return how much attention each key receives: the sum over the queries of its probability, before dropout.

    It takes O(N) memory, one pass over q·kᵀ, and without `lse` a pass before it. There is no gradient.

    Args:
        q: Queries, as `attention` takes them.
        k: Keys, as `attention` takes them, also in pages or with 8 bits.
        lse: lse of `attention` for the same call, float32. It is computed if it is None.

    Returns:
        float32, (B, Hq, Sk); (Hq, Tk) in layout `thd`; (B, Sk) and (Sk,) for q of 3 and 2 dimensions. With
        `block_table` a list with (Hq, length) for each sequence. A query that sees no key adds nothing; a key beyond
        `kv_lengths` has 0.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do.
    """
    tensors, options = _read("key_weights", q, k, keywords)
    given = checked({**tensors, "lse": lse})
    found = weights.key_weights(given, options, given.pop("lse"))
    return found if given["block_table"] is None else of_sequences(found, given)


@overridable
@documented
def attention_weights(
    q: Tensor, k: Tensor, *, rows: Sequence[int] | Tensor, **keywords: Unpack[OfKeys]
) -> Tensor | list[Tensor]:
    """Return the probabilities with which some queries attend to each key, before dropout: rows of softmax(…).

    It is for the few queries that a person wants to see: each row takes one pass over k. There is no gradient.

    Args:
        q: Queries, as `attention` takes them.
        k: Keys, as `attention` takes them, also in pages or with 8 bits.
        rows: Numbers of R queries, from 0: of each sequence, or of the packed queries in layout `thd`.

    Returns:
        float32, (B, Hq, R, Sk); (Hq, R, Tk) in layout `thd`; (B, R, Sk) and (R, Sk) for q of 3 and 2 dimensions. With
        `block_table` a list with (Hq, R, length) for each sequence. A row beyond `q_lengths` is 0.

    Raises:
        ProblemError: a ValueError whose `errors` name each field that is not valid or that the backend cannot do.
    """
    tensors, options = _read("attention_weights", q, k, keywords)
    given = checked(tensors)
    found = weights.key_weights(given, options, rows=_numbers(rows, q, options.layout))
    return found if given["block_table"] is None else of_sequences(found, given)


def _read(call: str, q: Tensor, k: Tensor, keywords: Any) -> tuple[dict[str, Any], Options]:
    """Return the tensors and the options of a call."""
    if unknown := [name for name in keywords if name not in _TAKEN]:
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")
    if (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()) and isinstance(q, Tensor):
        q, k = autocast(q, k)
    options = Options(**{name: value for name, value in keywords.items() if name in OPTIONS})
    tensors = {name: keywords.get(name) for name in _TAKEN if name not in OPTIONS}
    return {"q": q, "k": k, **tensors, "k_scale": scale_tensor(keywords.get("k_scale"))}, options


def _numbers(rows: Sequence[int] | Tensor, q: Tensor, layout: str) -> list[int]:
    """Return the numbers of queries. Raises ProblemError for one that q does not have."""
    given = number_of(rows)
    axis = 0 if layout == "thd" or q.ndim < 2 else q.ndim - 3 if layout == "bshd" and q.ndim == 4 else q.ndim - 2
    count = q.shape[axis]
    if not isinstance(given, (list, tuple, range)) or not all(is_integer(n) and 0 <= n < count for n in given):
        raise ProblemError([("rows", f"must be a list of numbers from 0 to {count - 1}, not {given!r}")])
    return [int(n) for n in given]
