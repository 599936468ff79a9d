"""Which probabilities dropout keeps: Philox4x32-10 in torch, the contract's formula word for word.

Key (i, j) of query head h of sequence b is kept iff word j mod 4 of Philox4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") is at least p·2³², with key = the seed's low and high 32 bits and counter =
(j div 4, i, h, b). The mask of a tile is computed from its indices alone, so any tiling draws the same mask.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def drop_below(p: float) -> int:
    """ceil(p·2³²): words below it are dropped. Exact, for scaling by a power of two is; 2³² where p rounds up to it."""
    return math.ceil(p * 2.0**32)


def keep_mask(
    seed: int, p: float, sequence: int, heads: range, queries: range, keys: range, device: torch.device
) -> Tensor:
    """(heads, queries, keys) of bool, true where kept, for query heads, queries and keys of `sequence`.

    The ranges are of step 1; memory is O(the tile).
    """

    def indices(r: range) -> Tensor:
        return torch.arange(r.start, r.stop, dtype=torch.int64, device=device)

    first = keys.start // 4
    columns = range(first, max(first, -(-keys.stop // 4)))
    counter = (
        indices(columns)[None, None, :],
        indices(queries)[None, :, None],
        indices(heads)[:, None, None],
        torch.full((1, 1, 1), sequence, dtype=torch.int64, device=device),
    )
    words = torch.stack(philox(seed, counter), dim=-1).flatten(-2)
    skipped = keys.start - 4 * first
    return words[..., skipped : skipped + len(keys)] >= drop_below(p)


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10, held in int64, for broadcastable int64 counters below 2³²."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(p1, c1, k0), _high(p0, c3, k1)
        c1, c3 = p1.bitwise_and_(_WORD), p0.bitwise_and_(_WORD)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _high(product: Tensor, word: Tensor, key: int) -> Tensor:
    """The high word of a product, with `word` and `key` mixed in.

    A product below 2⁶⁴ wraps into the sign bit of int64; the shift's sign extension is masked off again.
    """
    high = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(key)
    # The first rounds' words are of fewer dimensions: what they are mixed with may be larger, or smaller, than they.
    return high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
