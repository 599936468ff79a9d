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
    words = philox(seed, counter)
    keep = torch.empty(*words[0].shape, 4, dtype=torch.bool, device=device)
    for n, word in enumerate(words):
        torch.ge(word, drop_below(p), out=keep[..., n])
    skipped = keys.start - 4 * first
    return keep.flatten(-2)[..., skipped : skipped + len(keys)]


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10, held in int64, for broadcastable int64 counters below 2³²."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    room = None
    for step in range(_ROUNDS):
        # The first rounds' words are of fewer dimensions. Then each is computed where one lay that is done with: new
        # memory takes as long as what is computed in it.
        in_place = step > 0 and c0.shape == c1.shape == c2.shape == c3.shape
        p0 = torch.mul(c0, _MULTIPLIERS[0], out=c0 if in_place else None)
        p1 = torch.mul(c2, _MULTIPLIERS[1], out=c2 if in_place else None)
        c0 = _high(p1, c1, k0, room)
        c2 = _high(p0, c3, k1, c1 if in_place else None)
        room = c3 if in_place else None
        c1, c3 = p1, p0  # of which the low words are meant: what is above them is masked off when it is mixed
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


def _high(product: Tensor, word: Tensor, key: int, room: Tensor | None) -> Tensor:
    """The high word of a product, with the low one of `word` and `key` mixed in, in `room` where there is some.

    A product below 2⁶⁴ wraps into the sign bit of int64: the shift's sign extension is masked off again.
    """
    high = torch.bitwise_right_shift(product, 32, out=room)
    high = high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(_WORD)
