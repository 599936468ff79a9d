"""Which probabilities dropout keeps: Philox4x32-10 in torch, the contract's formula word for word.

Key (i, j) of query head h of sequence b is kept iff word j mod 4 of Philox4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") is at least p·2³², with key = the seed's low and high 32 bits and counter =
(j div 4, i, h, b). The mask of a tile is computed from its indices alone, so any tiling draws the same mask.
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
    """ceil(p·2³²): words below it are dropped. Exact, for scaling by a power of two is; 2³² where p rounds up to it."""
    return math.ceil(p * 2.0**32)


def room_for(heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Memory in which `kept_bits` can make the mask of a tile of at most so many heads, queries and keys."""
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
    """Return (sequences·heads, queries, keys) int32: all bits set where kept, none where dropped.

    To be and-ed with the bits of a float32. The ranges are of step 1. Memory is O(the tile): the mask is in `room`
    where that is given, which tiles may use in turn.
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
        torch.tensor(sequences, device=device).repeat_interleave(_each(sequences, heads))[:, None, None],
        memory,
    )
    # Two words in each int64, one in each int32: there a comparison is of vectors, where one that gives bool is not.
    for n in (0, 2):
        torch.bitwise_or(words[n], words[n + 1].bitwise_left_shift_(32), out=memory.pairs[..., n // 2 :: 2])
    bits = memory.pairs.bitwise_xor_(_SIGNS).view(torch.int32)  # orders them as if they had no sign
    bits.gt_(drop_below(p) - 2**31 - 1).neg_()
    skipped = keys.start - 4 * first
    return bits[..., skipped : skipped + len(keys)]


def _each(sequences: Sequence[int], heads: range) -> int:
    """How often a sequence's number is repeated: one number serves all heads of one sequence."""
    return 1 if len(sequences) == 1 else len(heads)


_SIGNS = -0x7FFFFFFF80000000  # the highest bit of either half
_WORDS = 8  # four of a counter, the two products of a round, and the pairs that the mask is made of


class _Memory:
    """Places for words of a tile's shape, lent and given back: new ones take as long as what is computed in them."""

    def __init__(self, shape: tuple[int, ...], room: Tensor) -> None:
        self._shape = shape
        size = math.prod(shape)
        self.pairs = room[: 2 * size].view(*shape[:2], 2 * shape[2])
        self._free = [room[n * size : (n + 1) * size].view(shape) for n in range(2, _WORDS)]

    def lend(self, one: Tensor, other: Tensor) -> Tensor | None:
        """A place for what is computed from two words, or None, where torch makes one: it is smaller than the tile."""
        return self._free.pop() if tuple(map(max, one.shape, other.shape)) == self._shape else None

    def give_back(self, *words: Tensor) -> None:
        self._free += (word for word in words if word.shape == self._shape)


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, memory: _Memory) -> tuple[Tensor, ...]:
    """The four 32-bit words of Philox4x32-10, held in int64, for int64 counters below 2³² that broadcast together.

    The second and the fourth word have more bits above their lower 32. The words of the first rounds have fewer
    dimensions, and cost little.
    """
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        p0 = torch.mul(c0, _MULTIPLIERS[0], out=memory.lend(c0, c0))
        p1 = torch.mul(c2, _MULTIPLIERS[1], out=memory.lend(c2, c2))
        memory.give_back(c0, c2)
        c0, c2 = _mixed(p1, c1, k0, memory), _mixed(p0, c3, k1, memory)
        memory.give_back(c1, c3)
        c1, c3 = p1, p0  # of which the low words are meant: what is above them is masked off when it is mixed
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _mixed(product: Tensor, word: Tensor, key: int, memory: _Memory) -> Tensor:
    """The high word of a product, with the low one of `word` and `key` mixed in.

    A product below 2⁶⁴ wraps into the sign bit of int64: the shift's sign extension is masked off again.
    """
    mixed = memory.lend(product, word)
    whole = mixed is not None and product.shape == mixed.shape
    high = torch.bitwise_right_shift(product, 32, out=mixed if whole else None)
    if high.shape == word.shape:
        return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_WORD)
    return torch.bitwise_xor(high, word ^ key, out=mixed).bitwise_and_(_WORD)
