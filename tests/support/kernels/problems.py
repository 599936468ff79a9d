"""A hypothesis strategy that draws forward or backward problems: their shapes, layouts, strides, options and tensors.

The answers of every backend that takes a problem must agree with attention in float64. Device tests (`make gpu`) run
without hypothesis, and so without this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.serving import DTYPES, FORMS, drawn_blocks, in_pages, of_eight_bits
from tests.support.kernels.solving import MEMORY, normal, qkv, restrided

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BOOL, FLOAT = "bool", "float"
# All shapes of a mask (sequences, heads, queries, keys), as flags: 1 for a full dimension, 0 for one of size 1.
_SHAPES = tuple((n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1) for n in range(16))
_LEADS = ("", "one", "heads", "sequences", "own")  # choices of a block mask's leading dimensions; "" is none
Tensors = dict[str, Tensor]


class Sizes(NamedTuple):
    """Strategies for the sizes of problems; tests include sizes at the edges of a backend's tiles and registers."""

    q_len: st.SearchStrategy[int]
    kv_len: st.SearchStrategy[int]
    dim: st.SearchStrategy[int]
    value_dim: st.SearchStrategy[int]
    batch: st.SearchStrategy[int] = st.just(2)
    kv_heads: st.SearchStrategy[int] = st.integers(1, 3)
    group: st.SearchStrategy[int] = st.sampled_from([1, 2, 5])


@st.composite
def problems(
    draw: st.DrawFn,
    sizes: Sizes,
    *,
    backward: bool,
    windows: Sequence[tuple[int, int]] = ((-1, -1), (0, 0), (20, 5), (5, 200), (63, -1), (-1, 40)),
    layouts: Sequence[str] = ("bhsd", "bshd", "thd"),
    masks: Sequence[str] = ("", BOOL, FLOAT),
    block_sizes: Sequence[tuple[int, int] | None] = (None, None, (16, 16), (48, 80), (128, 128)),
    page_sizes: Sequence[int] = (0, 0, 7, 16, 100),
    dropout: Sequence[float] = (0.0, 0.0, 0.1, 0.4, 0.75),
    slope: float = 1 / 8,
) -> tuple[Tensors, dict[str, Any]]:
    """Draw the tensors and the options of a problem.

    Args:
        draw: The function of hypothesis that draws from a strategy.
        sizes: The strategies for the sizes of the tensors.
        backward: Whether to draw a backward problem, with `do` and all its gradients, but no 8-bit keys and no pages.
        windows: The windows (left, right) to choose from.
        layouts: The layouts to choose from. In `thd`, sequences have drawn lengths, and there is no mask.
        masks: The kinds of `attn_mask` to choose from; "" is none.
        block_sizes: The block sizes of `block_mask` to choose from; None is no block mask.
        page_sizes: The numbers of keys in a page to choose from; 0 is no pages.
        dropout: The dropout probabilities to choose from.
        slope: A factor of ALiBi's slopes, which are otherwise absolute values of normal numbers.
    """

    def one_of(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    def yes() -> bool:
        return draw(st.booleans())

    batch, kv_heads, group = draw(sizes.batch), draw(sizes.kv_heads), draw(sizes.group)
    q_len, kv_len, heads = draw(sizes.q_len), draw(sizes.kv_len), kv_heads * group
    layout, dtype, seed = one_of(layouts), one_of(FLOATS), draw(st.integers(0, 2**20))
    packed = layout == "thd"
    t = qkv(batch, heads, q_len, kv_len, draw(sizes.dim), kv_heads=kv_heads, value_dim=draw(sizes.value_dim),
            dtype=dtype, seed=seed)  # fmt: skip
    if not backward:
        del t["do"]
    lengths = {
        name: [length, *draw(st.lists(st.integers(0, length), min_size=batch - 1, max_size=batch - 1))]
        for name, length in (("q", q_len), ("k", kv_len))
    }
    if packed:
        t = _packed(t, lengths)
    elif layout == "bshd":
        t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
    if not packed and yes():
        t |= {f"{'q' if name == 'q' else 'kv'}_lengths": torch.tensor(n[::-1]) for name, n in lengths.items()}
    page = 0
    if not backward:
        if one_of((False, False, True)):
            t = of_eight_bits(t, layout, one_of(tuple(DTYPES)), one_of(FORMS), sequences=batch)
        if page := one_of(page_sizes):
            t = in_pages(t, layout, page, seed=seed, strided=yes())
    names = ("q", "do") if page else ("q", "k", "v", "do")
    t |= {name: restrided(t[name], one_of(MEMORY)) for name in names if name in t and t[name].itemsize > 1}
    keys = -(-kv_len // page) * page if page else kv_len
    options: dict[str, Any] = {
        "layout": layout, "causal": yes(), "window": one_of(windows), "softcap": one_of((0.0, 0.0, 0.7, 2.5, 30.0)),
        "scale": one_of((None, None, 0.3, -0.2, 0.0)),
    }  # fmt: skip
    if p := one_of(dropout):
        options |= {"dropout_p": p, "dropout_seed": draw(st.integers(0, 2**64 - 1))}
    offset = one_of(("", "", "one", "each"))
    if offset:
        drawn = draw(st.lists(st.integers(-9, kv_len), min_size=batch, max_size=batch))
        t["offset"] = torch.tensor(drawn if offset == "each" else drawn[0])
    else:
        options["causal_alignment"] = one_of(("bottom_right", "top_left"))
    grads = ["dq", "dk", "dv"]
    if slopes := one_of(("", "heads", "each")):
        t["alibi_slopes"] = normal(*((batch, heads) if slopes == "each" else (heads,)), seed=seed).abs() * slope
    if yes():
        t["sinks"] = normal(heads, seed=seed + 1)
        grads.append("dsinks")
    if backward and yes():
        t["dlse"] = normal(*((heads, len(t["q"])) if packed else (batch, heads, q_len)), seed=seed + 2)
    mask = "" if packed else one_of(masks)
    if mask:
        shape = [n if own else 1 for n, own in zip((batch, heads, q_len, keys), one_of(_SHAPES), strict=True)]
        while len(shape) > 1 and shape[0] == 1 and yes():
            del shape[0]
        numbers = normal(*shape, seed=seed + 3)
        t["attn_mask"] = numbers > -1 if mask == BOOL else numbers.to(one_of((dtype, torch.float32, torch.float64)))
        grads += ["dattn_mask"] if mask == FLOAT else []
    if not packed and (size := one_of(block_sizes)):
        lead = {"one": (1,), "heads": (heads,), "sequences": (batch, 1), "own": (batch, heads)}.get(one_of(_LEADS), ())
        blocks = (-(-n // block) for n, block in zip((q_len, keys), size, strict=True))
        t["block_mask"] = drawn_blocks(*lead, *blocks, seed=seed, share=one_of((0.1, 0.6)))
        options["block_size"] = size
    return t, options | ({"grads": grads} if backward else {"return_lse": True})


def _packed(t: Tensors, lengths: dict[str, list[int]]) -> Tensors:
    """Return the tensors in layout thd: the first rows of each sequence, as many as its length, one after another."""
    packed = {}
    for name, x in t.items():
        of = lengths["k" if name in ("k", "v") else "q"]
        packed[name] = torch.cat([x[b, :, :length].transpose(0, 1) for b, length in enumerate(of)]).contiguous()
    return packed | {f"cu_seqlens_{name}": torch.tensor([0, *of]).cumsum(0) for name, of in lengths.items()}
