"""`flex_attention`, with the signature of torch's function of that name: any `score_mod`, any `BlockMask`, gradients.

It runs by tiles of torch operations. A tile is TILE_Q queries and up to TILE_K keys of all heads: the scores of a tile
are computed, changed by `score_mod` and added to an online softmax, so memory is O(N) (FlashAttention, Dao et al. 2022,
Algorithm 1). The backward computes the scores again, and differentiates `score_mod` by autograd, tile by tile. Blocks
that the mask excludes for all heads are not computed. operators/flexible.py has the tiles.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from flashpoint_contract.options import UNBOUNDED, ProblemError
from flashpoint_kernels.operators.derivatives import applied, transformed
from flashpoint_kernels.operators.flexible import FlexAttention
from flashpoint_kernels.operators.scores import Blocks, Flex, ScoreMod, captured_by
from flashpoint_kernels.operators.torch_rules import autocast, overridable, refuse_nested
from flashpoint_kernels.problems.memory import check_memory
from flashpoint_kernels.problems.modes import traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask  # slow: imports torch._dynamo


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None, *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: Any = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None, *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip


@overridable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Return softmax(score_mod(scale·query·keyᵀ))·value, where `block_mask` lets a query see a key.

    Args:
        query: (B, Hq, L, E), float16, bfloat16, float32 or float64. Scores are computed in float32, or in float64.
        key: (B or 1, Hk, S, E).
        value: (B or 1, Hk, S, Ev).
        score_mod: Function of a score, and of the numbers of its sequence, head, query and key, which are tensors
            without dimensions. It is mapped over a tile by `torch.vmap`, as in torch.
        block_mask: torch's BlockMask. Keys in blocks that it does not list are not visible; in blocks that are not
            full, its `mask_mod` decides which keys are visible.
        scale: Factor of query·key. None is 1/sqrt(E).
        enable_gqa: Hq may be a multiple of Hk: each key head has Hq/Hk query heads.
        return_lse: Return (out, lse).
        kernel_options: Changes nothing: these options choose a schedule.
        return_aux: Return (out, AuxOutput), with the values that this AuxRequest names: lse, max_scores.

    Returns:
        out, (B, Hq, L, Ev), in query's dtype, with the dimensions in the order of query's strides; lse and max_scores
        are (B, Hq, L), float32, or float64 for float64. A query that sees no key has out = 0 and lse = −∞.

        Differentiable twice, in query, key, value, and the tensors that `score_mod` captures and that require a
        gradient, through out and lse, in reverse and forward mode.

    Raises:
        ProblemError: a ValueError whose `errors` name what is not valid.
    """
    refuse_nested((("query", query), ("key", key), ("value", value)))
    query, key, value = autocast(query, key, value)
    _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    check_memory(query=query, key=key, value=value)
    key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    blocks = None if block_mask is None else Blocks.of(block_mask, query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(max(query.shape[3], 1)) if scale is None else scale
    out, lse, largest = _run(Flex(float(scale), score_mod, blocks), query, key, value)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _check(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None,
    enable_gqa: bool, return_lse: bool, return_aux: AuxRequest | None,
) -> None:  # fmt: skip
    if traced() and not (score_mod is None and block_mask is None):
        name = "block_mask" if score_mod is None else "score_mod"
        raise ProblemError([(name, "is not available under torch.jit.trace, as in torch: use torch.compile")])
    errors = []
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            raise ProblemError([(name, f"must have 4 dimensions, (batch, heads, rows, columns), not {t.ndim}")])
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            errors.append((name, f"must be float16, bfloat16, float32 or float64, not {t.dtype}"))
        if (t.dtype, t.device) != (query.dtype, query.device):
            errors.append((name, f"is {t.dtype} on {t.device}, and query {query.dtype} on {query.device}"))
    (batch, heads, length, _), (_, kv_heads, keys, _) = query.shape, key.shape
    if query.shape[3] != key.shape[3]:
        errors.append(("key", f"has {key.shape[3]} columns, and query {query.shape[3]}"))
    if value.shape[:3] != key.shape[:3]:
        errors.append(("value", f"has shape {tuple(value.shape)}, and key {tuple(key.shape)}"))
    if len(key) not in (1, batch):
        errors.append(("key", f"has {len(key)} sequences, and query {batch}"))
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        shared = "" if enable_gqa else "; enable_gqa=True shares key heads"
        errors.append(("key", f"has {kv_heads} heads, and query {heads}{shared}"))
    if return_lse and return_aux is not None:
        errors.append(("return_lse", "must be False with return_aux: ask for AuxRequest(lse=True)"))
    if block_mask is not None:
        counts = block_mask.kv_num_blocks
        if counts.shape[0] not in (1, batch) or counts.shape[1] not in (1, heads):
            errors.append(("block_mask", f"is for {tuple(counts.shape[:2])} sequences and heads, not {(batch, heads)}"))
        # torch's mask for "no mask" has one block, which is larger than any length, and the lengths (1, 1).
        covered = block_mask.seq_lengths if min(block_mask.BLOCK_SIZE) < UNBOUNDED else block_mask.BLOCK_SIZE
        if covered[0] < length or covered[1] < keys:
            errors.append(("block_mask", f"is for {block_mask.seq_lengths} queries and keys, not {(length, keys)}"))
    if errors:
        raise ProblemError(errors)


def _run(flex: Flex, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute outside of a compiled program: `torch.compile` breaks its graph at this function."""
    captured = captured_by(flex, q)
    flex = replace(flex, captured=captured, moved=transformed())
    answers: tuple[Tensor, Tensor, Tensor] = applied(FlexAttention, flex, q, k, v, *captured)
    return answers


_run = torch._disable_dynamo(_run)  # type: ignore[attr-defined]  # torch.compiler.disable imports torch._dynamo: seconds
