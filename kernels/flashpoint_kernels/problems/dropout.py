"""Dropout masks: Philox4x32-10 in torch, exactly as the contract defines it.

Key (i, j) of query head h of sequence b is kept iff word j mod 4 of Philox4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") is at least p·2³², with key = low and high 32 bits of the seed, and counter = (j div 4, i,
h, b). The mask of a tile depends only on its indices, so every tiling gives the same mask.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def drop_below(p: float) -> int:
    """Return ceil(p·2³²): dropout drops each (query, key) pair whose random 32-bit word is smaller.

    The result is exact, because multiplication by 2³² is exact. It is 2³², so that every pair is dropped, if p is
    larger than 1 − 2⁻³².
    """
    return math.ceil(p * 2.0**32)


def room_for(heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return memory for `kept_bits` of a tile with at most this many heads, queries and keys."""
    return torch.empty(_WORDS * heads * queries * (keys // 4 + 2), dtype=torch.int64, device=device)


def kept_bits(
    seed: int,
    p: float,
    sequences: Sequence[int],
    heads: range,
    queries: range,
    keys: range,
    device: torch.device,
    room: Tensor | None = None,
) -> Tensor:
    """Return (sequences·heads, queries, keys) int32: all bits are set for kept pairs, none for dropped ones.

    Combine it with the bits of a float32 by AND. The ranges have step 1. Memory is proportional to the tile. With
    `room`, the mask lies in it; tiles may reuse the same room.
    """

    def indices(r: range) -> Tensor:
        return torch.arange(r.start, r.stop, dtype=torch.int64, device=device)

    first = keys.start // 4
    columns = range(first, max(first, -(-keys.stop // 4)))
    shape = (len(sequences) * len(heads), len(queries), len(columns))
    memory = _Memory(shape, room_for(*shape[:2], len(keys), device) if room is None else room)
    words = _philox(
        seed,
        indices(columns)[None, None, :],
        indices(queries)[None, :, None],
        indices(heads).repeat(len(sequences))[:, None, None],
        torch.tensor(sequences, dtype=torch.int64, device=device).repeat_interleave(_each(sequences, heads))[
            :, None, None
        ],
        memory,
    )
    # Put two words into each int64, one into each int32: comparisons of these are vectorised, but comparisons that
    # return bool are not.
    for n in (0, 2):
        torch.bitwise_or(words[n], words[n + 1].bitwise_left_shift_(32), out=memory.pairs[..., n // 2 :: 2])
    # Flip the sign bits: a signed comparison then orders unsigned words.
    bits = memory.pairs.bitwise_xor_(_SIGNS).view(torch.int32)
    bits.gt_(drop_below(p) - 2**31 - 1).neg_()
    skipped = keys.start - 4 * first
    return bits[..., skipped : skipped + len(keys)]


def _each(sequences: Sequence[int], heads: range) -> int:
    """Return how many times to repeat the index of each sequence: once is enough for all heads of a single sequence."""
    return 1 if len(sequences) == 1 else len(heads)


_SIGNS = -0x7FFFFFFF80000000  # the highest bit of each half
_WORDS = 8  # number of int64 tensors in a room: four words of a counter, two products of a round, two for the mask


class _Memory:
    """Reusable memory for tensors of a tile's shape: allocating memory takes as long as the computation in it."""

    def __init__(self, shape: tuple[int, ...], room: Tensor) -> None:
        self._shape = shape
        size = math.prod(shape)
        self.pairs = room[: 2 * size].view(*shape[:2], 2 * shape[2])
        self._free = [room[n * size : (n + 1) * size].view(shape) for n in range(2, _WORDS)]

    def lend(self, one: Tensor, other: Tensor) -> Tensor | None:
        """Return memory for a result of two words; None if the result is smaller than a tile (torch then allocates)."""
        return self._free.pop() if tuple(map(max, one.shape, other.shape)) == self._shape else None

    def give_back(self, *words: Tensor) -> None:
        self._free += (word for word in words if word.shape == self._shape)


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, memory: _Memory) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 in int64, for int64 counters below 2³² that broadcast together.

    The second and fourth word may have bits above the lower 32. The words of the first rounds have fewer dimensions and
    cost little.
    """
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        p0 = torch.mul(c0, _MULTIPLIERS[0], out=memory.lend(c0, c0))
        p1 = torch.mul(c2, _MULTIPLIERS[1], out=memory.lend(c2, c2))
        memory.give_back(c0, c2)
        c0, c2 = _mixed(p1, c1, k0, memory), _mixed(p0, c3, k1, memory)
        memory.give_back(c1, c3)
        c1, c3 = p1, p0  # only their low words count: mixing masks off the higher bits
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _mixed(product: Tensor, word: Tensor, key: int, memory: _Memory) -> Tensor:
    """Return the high word of a product, XORed with the low word of `word` and with `key`.

    A product below 2⁶⁴ may use the sign bit of int64: the shift's sign extension is masked off.
    """
    mixed = memory.lend(product, word)
    whole = mixed is not None and product.shape == mixed.shape
    high = torch.bitwise_right_shift(product, 32, out=mixed if whole else None)
    if high.shape == word.shape:
        return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_WORD)
    return torch.bitwise_xor(high, word ^ key, out=mixed).bitwise_and_(_WORD)
