"""Values of q, k, v and do that expose mistakes of kernels, in addition to normal values.

A kind whose name ends with `-exact` has scores that float16 and bfloat16 represent exactly: only one channel of q and k
is not zero. Rounding to the data type then explains no error, so that the bound L (exact/bounds.py) stays narrow for
16-bit types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.problems.modes import without_autocast
from flashpoint_kernels.problems.problem import DTYPES

_EDGES = (0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 1025, 2047, 2048, 4095, 4096)
_FAR_EDGES = (8191, 8192, 16383, 16384, 32767, 32768, 65535, 65536)


@dataclass
class Draw:
    """The tensors of a case while their values are made: bhsd, float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    case: Any  # a `cases.Case`
    generator: torch.Generator

    @property
    def root(self) -> float:
        """The product q·k whose scaled score is 1: sqrt(D), or 1/scale."""
        scale: float | None = self.case.scale
        return float(self.case.head_dim**0.5 if scale is None else 1 / scale)

    def clear(self) -> None:
        """Set q and k to 0."""
        self.q.zero_()
        self.k.zero_()

    def add(self, scores: Tensor, channel: int = 0) -> None:
        """Add one number per key to all scores, through one channel in which q is a power of 2."""
        factor = _power(self.root)
        self.q[..., channel] = factor
        self.k[..., channel] = scores * (self.root / factor)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=torch.float32, device="cpu")

    def key(self) -> int:
        return int(torch.randint(self.case.kv_len, (1,), generator=self.generator, dtype=torch.int64, device="cpu"))

    def places(self) -> Tensor:
        """Return the index of each key, as numbers."""
        return torch.arange(self.case.kv_len, dtype=torch.float32, device="cpu")


def _power(x: float) -> float:
    return 2.0 ** math.floor(math.log2(abs(x)))


def _shift(d: Draw, target: float) -> None:
    """Set channel 0 of q and k so that it adds the same number, between target / 4 and target, to all scores."""
    root = _power(math.sqrt(abs(target) * d.root))
    d.q[..., 0] = root
    d.k[..., 0] = math.copysign(root, target)


def _massive(d: Draw) -> None:
    channels = torch.randperm(d.case.head_dim, generator=d.generator, dtype=torch.int64, device="cpu")[:3]
    factor = 20.0 if d.case.dtype == "float16" else 100.0
    for t in (d.q, d.k):
        t[..., channels] *= factor
    d.v[..., channels[0] % d.case.value_dim] *= factor


def _low(d: Draw) -> None:
    """Make all scores less than about −5e4 (in float16: −3,000 to −750), and all values about 3.

    A finite number in place of −∞ as the first maximum then gives outputs near 0, which are wrong.
    """
    d.q.mul_(0.5)
    d.v.add_(3)
    if d.case.dtype == "float16":
        _shift(d, -3000.0)
    else:
        d.q[..., 0], d.k[..., 0] = _lowest(d)


def _lowest(d: Draw) -> tuple[float, float]:
    """Return values of q and k whose scores are −65,536 to −131,072."""
    return 512.0, -128.0 * 2.0 ** math.ceil(math.log2(abs(d.root)))


def _low_exact(d: Draw) -> None:
    d.clear()
    d.v.add_(3)
    if d.case.dtype == "float16":
        d.q[..., 0], d.k[..., 0] = 128.0, -128.0
    else:
        d.q[..., 0], d.k[..., 0] = _lowest(d)


def _neg_exact(d: Draw) -> None:
    """Make scores of −512 and −516: their exp is 0 unless the maximum is subtracted."""
    d.clear()
    d.add(4.0 * (d.places() % 3 == 0).float() - 516.0)


def _high_exact(d: Draw) -> None:
    d.clear()
    d.add(4.0 * (d.places() % 3 == 0).float() + 508.0)


def _gap_exact(d: Draw) -> None:
    """Give one key almost all weight and a value of 0, so that o depends only on all other keys."""
    d.clear()
    x = -12.0 - torch.floor(68 * d.uniform(d.case.kv_len))
    at = d.key()
    x[at] = 0.0
    d.add(x)
    d.v.mul_(30)
    d.v[:, :, at] = 0


def _rising_exact(d: Draw) -> None:
    d.clear()
    d.add((d.places() // 16) * 2.0)


def _lastmax_exact(d: Draw) -> None:
    d.clear()
    x = torch.zeros(d.case.kv_len, dtype=torch.float32, device="cpu")
    x[-1:] = 12.0
    d.add(x)
    d.v[:, :, -1:] *= 4


def _falling_exact(d: Draw) -> None:
    """Give the first key the largest score, which reveals that a kernel skips the first tile."""
    d.clear()
    d.add(-2.0 * (d.places() // 16))


def _mixed_exact(d: Draw) -> None:
    """Make scores of 0 to 8 in random order."""
    d.clear()
    d.add(torch.floor(9 * d.uniform(d.case.kv_len)))
    d.v += 2


def _gap(d: Draw) -> None:
    x = -12 - 68 * d.uniform(d.case.kv_len)
    at = d.key()
    x[at] = 0
    d.q.mul_(0.1)
    d.add(x)
    d.v.mul_(30)
    d.v[:, :, at] = 0


def _rising(d: Draw) -> None:
    d.q.mul_(0.5)
    d.add((d.places() // 16) * 2.0)


def _lastmax(d: Draw) -> None:
    x = torch.zeros(d.case.kv_len, dtype=torch.float32, device="cpu")
    x[-1:] = 12.0
    d.q.mul_(0.5)
    d.add(x)
    d.v[:, :, -1:] *= 4


def _neg(d: Draw) -> None:
    d.q.mul_(0.5)
    _shift(d, -400.0)


def _high(d: Draw) -> None:
    d.q.mul_(0.5)
    _shift(d, 300.0)


def _ties(d: Draw) -> None:
    d.k[:] = d.k[:, :, :1].clone()


def _dup(d: Draw) -> None:
    pairs = d.case.kv_len // 2 * 2
    d.k[:, :, 1::2] = d.k[:, :, 0:pairs:2].clone()


def _edges(d: Draw) -> None:
    """Make each query attend mainly to one key, whose index is at the edge of a tile or near the end."""
    m, n = d.case.kv_len, d.case.q_len
    at = [x for x in (*_EDGES, *_FAR_EDGES, m - 17, m - 16, m - 2, m - 1) if 0 <= x < m]
    chosen = torch.tensor([at[-1 - i % len(at)] for i in range(n)], dtype=torch.int64, device="cpu")
    keys = torch.nn.functional.normalize(d.k[:, :, chosen], dim=-1).repeat_interleave(d.case.group, 1)
    d.q[:] = 3 * keys * d.root
    if m > 4096:  # so that the many other keys have no weight
        d.q *= 2


def _aimed(d: Draw) -> None:
    """Make each query attend mainly to one key: at a limit of the keys that it sees, just outside, or at a tile's edge.

    Options that hide a wrong key, or too few, then change the output by more than rounding does.
    """
    case, m, n = d.case, d.case.kv_len, d.case.q_len
    left, right = case.window
    at = torch.arange(n, dtype=torch.int64, device="cpu") + m - n
    low = (at - left).clamp(0, m - 1) if left >= 0 else torch.zeros_like(at)
    high = torch.full_like(at, m - 1)
    for limit in ([right] if right >= 0 else []) + ([0] if case.causal else []):
        high = torch.minimum(high, (at + limit).clamp_min(0))
    inside = low + (d.uniform(n) * (high - low + 1)).long()
    edges = [x for x in (*_EDGES, *_FAR_EDGES) if x < m]
    edge = torch.tensor(edges, dtype=torch.int64, device="cpu")[(d.uniform(n) * len(edges)).long()]
    tile = high // 64 * 64
    targets = torch.stack([low, high, low - 1, high + 1, inside, inside, edge, tile, tile - 1, torch.zeros_like(at)])
    start = d.key()  # few rows see few targets: other seeds begin with others
    chosen = targets[(at + start) % len(targets), torch.arange(n, dtype=torch.int64, device="cpu")].clamp(0, m - 1)
    keys = torch.nn.functional.normalize(d.k[:, :, chosen], dim=-1).repeat_interleave(case.group, 1)
    d.q[:] = (6 if m > 4096 else 3) * keys * d.root


def _offset(d: Draw) -> None:
    d.v += 100
    d.do += 3


def _flat(d: Draw) -> None:
    """Make all weights equal and all values positive: a sum in a type with few bits then stops growing."""
    d.clear()
    d.v.abs_().add_(1)
    d.do.abs_().add_(1)


def _unseen(d: Draw) -> None:
    """Give large scores and values to the last keys, which a causal mask hides from most queries, to reveal leaks."""
    tail = max(1, d.case.kv_len // 4)
    d.k[:, :, -tail:] *= 4
    d.v[:, :, -tail:] *= 100


def _small(d: Draw) -> None:
    d.v.mul_(1 / 1024)
    d.do.mul_(1 / 64)
    d.q.mul_(0.1)


def _tiny(d: Draw) -> None:
    """Make all values and gradients less than 1e-6, except in float16, whose smallest numbers they would be."""
    factor = 2.0**-13 if d.case.dtype == "float16" else 2.0**-30
    d.v.mul_(factor)
    d.do.mul_(factor)


def _sharp(d: Draw) -> None:
    """Make scores with a standard deviation of 4: most weight is on few keys."""
    d.q.mul_(4)


KINDS: Mapping[str, Callable[[Draw], None]] = {
    "normal": lambda d: None,
    "massive": _massive, "low": _low, "neg": _neg, "high": _high, "gap": _gap, "rising": _rising, "lastmax": _lastmax,
    "ties": _ties, "dup": _dup, "edges": _edges, "offset": _offset, "flat": _flat, "unseen": _unseen, "small": _small,
    "sharp": _sharp, "tiny": _tiny, "aimed": _aimed, "low-exact": _low_exact, "neg-exact": _neg_exact,
    "high-exact": _high_exact, "gap-exact": _gap_exact, "rising-exact": _rising_exact, "lastmax-exact": _lastmax_exact,
    "falling-exact": _falling_exact, "mixed-exact": _mixed_exact,
}  # fmt: skip
EXACT = tuple(name for name in KINDS if name.endswith("-exact"))


@without_autocast()
def draw(case: Any) -> dict[str, Tensor]:
    """Return q, k, v and do, and the masks and extra tensors of a Case: bhsd, in its data type, on the CPU."""
    g = torch.Generator("cpu").manual_seed(case.seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float32, device="cpu")

    b, hq, hk, n, m, d, dv = case.shape
    drawn = Draw(normal(b, hq, n, d), normal(b, hk, m, d), normal(b, hk, m, dv), normal(b, hq, n, dv), case, g)
    KINDS[case.values](drawn)
    if case.ones:
        drawn.do.fill_(1.0)
    to = DTYPES[case.dtype]
    tensors = {"q": drawn.q.to(to), "k": drawn.k.to(to), "v": drawn.v.to(to), "do": drawn.do.to(to)}
    if case.mask:
        tensors["attn_mask"] = _mask(case, normal, g).to(torch.bool if case.mask.startswith("bool") else to)
    if "alibi_slopes" in case.extras:  # not the usual slopes, which a function may compute itself
        usual = torch.exp2(-8.0 * torch.arange(1, hq + 1, dtype=torch.float32, device="cpu") / hq)
        tensors["alibi_slopes"] = usual * (0.5 + drawn.uniform(hq))
    if "sinks" in case.extras:  # as large as all weights of a row together: a sink that is ignored changes the output
        scores = drawn.q[:, :, :8] @ drawn.k.repeat_interleave(case.group, 1).mT / drawn.root
        tensors["sinks"] = normal(hq) + scores.clamp(-1e4, 1e4).logsumexp(-1).mean((0, 2))
    if "kv_lengths" in case.extras:
        tensors["kv_lengths"] = torch.randint(1, m + 1, (b,), generator=g, dtype=torch.int32, device="cpu")
    return tensors


def shared(tensors: Mapping[str, Tensor], form: str, layout: str) -> dict[str, Tensor]:
    """Return tensors with the same values that share memory.

    Forms: `storage`: q, k and v lie one after another in one storage. `rows`: they are rows of one tensor, as after one
    projection; they must have one shape. `v is k`: v is k. `heads q k …`: these tensors have a stride of 0 over heads;
    `batch …`: over sequences. Their values must be equal there.
    """
    made = dict(tensors)
    kind, *names = form.split() if form != "v is k" else (form,)
    if kind == "storage":
        room = torch.cat([made[n].flatten() for n in "qkv"])
        parts = torch.split(room, [made[n].numel() for n in "qkv"])
        made |= {n: part.view(made[n].shape) for n, part in zip("qkv", parts, strict=True)}
    elif kind == "rows":
        made |= dict(zip("qkv", torch.stack([made[n] for n in "qkv"], -2).unbind(-2), strict=True))
    elif kind == "v is k":
        made["v"] = made["k"]
    for name in names:
        axis = 1 if name == "attn_mask" else layout.index(kind[0])
        made[name] = made[name].narrow(axis, 0, 1).clone().expand(made[name].shape)
    return made


def _mask(case: Any, normal: Callable[..., Tensor], g: torch.Generator) -> Tensor:
    """Return a mask of the form and with the hidden keys that `case.mask` names (see `Case`)."""
    b, hq, n, m = case.batch, case.q_heads, case.q_len, case.kv_len
    kind, *parts = case.mask.split("-")
    shapes = {"keys": (b, 1, 1, m), "heads": (1, hq, n, m), "one": (b, 1, n, m), "plane": (n, m), "rows": (b, hq, n, 1)}
    size = next((shapes[part] for part in parts if part in shapes), (b, hq, n, m))

    def chance(*size: int) -> Tensor:
        return torch.rand(size, generator=g, dtype=torch.float32, device="cpu")

    seen = chance(*size) < 0.7
    if "tiles" in parts:  # whole tiles of keys are hidden, and for most rows the first ones
        tile = 16 << int(torch.randint(4, (1,), generator=g, dtype=torch.int64, device="cpu"))
        seen = (chance(*size[:-1], -(-m // tile)) < 0.5).repeat_interleave(tile, -1)[..., :m]
        seen[..., : m // 2 // tile * tile] &= chance(*size[:-1], 1) < 0.3
        seen[..., -1] = True
    elif "rows" not in parts:
        seen[..., 0] = True  # each row sees key 0: other cases test rows without keys
    if "empty" in parts:  # whole rows are hidden
        seen &= chance(*size[:-1], 1) < 0.7
    return seen if kind == "bool" else normal(*size).mul_(2).masked_fill(~seen, -math.inf)
