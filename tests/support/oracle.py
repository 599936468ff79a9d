"""Attention by its definition: the expected answers of tests, in float64, from the sentences of the contract alone.

The oracle shares no code with what it judges: it imports NumPy, and torch only to read tensors. Its gradients are
written out by hand. It keeps the whole Sq × Sk matrix of each head in memory, so it is for small problems.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch

TENSORS = {
    "q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset",
    "cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale", "do", "dlse", "o", "lse",
}  # fmt: skip
MEANINGS = {
    "layout": "bhsd", "causal": False, "causal_alignment": "bottom_right", "window": (-1, -1), "block_size": (128, 128),
    "scale": None, "softcap": 0.0, "dropout_p": 0.0, "dropout_seed": None,
}  # fmt: skip
# Options that do not change the exact answer.
OTHERS = {"precision", "return_lse", "grads", "deterministic", "backend", "return_key_weights"}


def answer(tensors, options):
    """Return every answer by name, float64, in the shape that the contract names.

    `o`, `lse` and `key_weights` always; with `do` in `tensors` also `dq`, `dk` and `dv`, and where those inputs are
    given `dattn_mask` (of a float mask) and `dsinks`. `tensors` and `options` have the names of `attention`; numbers
    and lists are as good as tensors, and None as nothing. A given `o` and `lse` are not read.
    """
    given = {name: array_of(t) for name, t in tensors.items() if t is not None}
    options = {name: value for name, value in options.items() if name not in OTHERS}
    unknown = (given.keys() - TENSORS) | (options.keys() - MEANINGS.keys())
    assert not unknown, f"the oracle does not know {sorted(unknown)}"
    with np.errstate(all="ignore"):
        answers = Call(given, MEANINGS | options).solve()
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in answers.items()}


def array_of(t):
    if isinstance(t, torch.Tensor):
        t = t.detach().cpu().resolve_conj().resolve_neg()
        t = (t.double() if t.is_floating_point() else t).numpy()
    t = np.asarray(t)
    return t if t.dtype == bool or np.issubdtype(t.dtype, np.integer) else t.astype(np.float64)


class Call:
    """One call. Its answers have the shapes (B,H,S,·), or (H,T,·) for packed sequences, until `solve` returns them."""

    def __init__(self, given, options):
        self.given, self.options = given, options
        self.layout, self.rank = options["layout"], given["q"].ndim
        self.packed, self.paged = self.layout == "thd", "block_table" in given
        self.q = self._heads_first(given["q"])
        if self.paged:
            self.k, self.v = self._pages("k"), self._pages("v")
        else:
            self.k, self.v = (self._heads_first(self._scaled(name)) for name in "kv")
        self.do = self._heads_first(given["do"]) if "do" in given else None
        # lse and its gradient have heads first in every layout
        lead = self.q.shape[:-1]
        self.dlse = given["dlse"].reshape(lead) if "dlse" in given else None
        starts = given.get("cu_seqlens_q")
        self.batch = len(starts) - 1 if self.packed else len(self.q)

    def solve(self):
        lead = self.q.shape[:-1]
        answers = {"o": np.zeros((*lead, self.v.shape[-1])), "lse": np.full(lead, -np.inf)}
        keys = self.k.shape[-2]
        heads = (*lead[:-1],) if not (self.packed and self.paged) else (self.batch, lead[0])
        answers["key_weights"] = np.zeros((*heads, keys))
        if self.do is not None:
            answers |= {"d" + name: np.zeros(getattr(self, name).shape) for name in "qkv"}
            mask = self.given.get("attn_mask")
            if mask is not None and mask.dtype == np.float64:
                answers["dattn_mask"] = np.zeros(mask.shape)
            if "sinks" in self.given:
                answers["dsinks"] = np.zeros(self.given["sinks"].shape)
        for b in range(self.batch):
            self._sequence(b, answers)
        return {name: self._given_back(name, a) for name, a in answers.items()}

    def _probabilities(self, b):
        """Return what the answers of a sequence are made from: its places, its rows and its probabilities."""
        given, options = self.given, self.options
        queries, keys = self._places(b)
        q, k, v = self.q[queries], self.k[keys], self.v[keys]
        group = len(q) // len(k)
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        sq, sk = q.shape[1], k.shape[1]
        scale = 1 / math.sqrt(q.shape[-1]) if options["scale"] is None else float(options["scale"])
        shift = 0 if options["causal_alignment"] == "top_left" else sk - sq
        if "offset" in given:
            shift = int(given["offset"].reshape(-1)[b if given["offset"].size > 1 else 0])
        behind = np.arange(sq)[:, None] + shift - np.arange(sk)  # (sq,sk): i + offset − j

        # s = scale·q·kᵀ; then the softcap; then ALiBi and the mask; then keys that are not seen are removed
        s = scale * (q @ k.transpose(0, 2, 1))
        bend = np.ones_like(s)  # derivative of the softcap
        if cap := float(options["softcap"]):
            s = np.tanh(s / cap)
            bend, s = 1 - s * s, cap * s
        if "alibi_slopes" in given:
            slopes = given["alibi_slopes"]
            s = s - (slopes[b] if slopes.ndim == 2 else slopes)[:, None, None] * np.abs(behind)
        seen = np.ones(s.shape, bool)
        mask = self._mask(b, s.shape)
        if mask is not None:
            seen, s = (seen & mask, s) if mask.dtype == bool else (seen & (mask != -np.inf), s + mask)
        if "block_mask" in given:
            seen = seen & self._blocks(b, s.shape)
        left, right = (-1, -1) if options["window"] is None else options["window"]
        if options["causal"]:
            seen = seen & (behind >= 0)
        if left >= 0:
            seen = seen & (behind <= left)
        if right >= 0:
            seen = seen & (behind >= -right)

        sink = given.get("sinks", np.full(len(q), -np.inf))[:, None, None]
        s = np.where(seen, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        dead = top == -np.inf
        top = np.where(dead, 0, top)
        weights = np.where(seen, np.exp(s - top), 0)
        total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
        norm = np.where(dead, 1, total)
        return SimpleNamespace(
            queries=queries, keys=keys, q=q, k=k, v=v, group=group, scale=scale, s=s, seen=seen, bend=bend,
            p=weights / norm, kept=self._kept(b, s.shape), rest=np.where(dead, 0, np.exp(sink - top) / norm),
            lse=np.where(dead, -np.inf, np.log(total) + top),
        )  # fmt: skip

    def _sequence(self, b, answers):
        one = self._probabilities(b)
        p, seen = one.p, one.seen
        o = _product(p * one.kept, one.v, seen)
        answers["o"][one.queries] = o
        answers["lse"][one.queries] = one.lse[..., 0]
        weights_of = (b, slice(None), slice(0, p.shape[2])) if self.paged else one.keys
        answers["key_weights"][weights_of] = p.sum(1)
        if self.do is None:
            return

        do = self.do[one.queries]
        dp = np.where(seen, do @ one.v.transpose(0, 2, 1), 0) * one.kept
        inner = (np.where(seen, p * dp, 0)).sum(-1, keepdims=True)  # (H,sq,1)
        dlse = np.zeros_like(inner) if self.dlse is None else self.dlse[one.queries][..., None]
        ds = np.where(seen, p * (dp - inner + dlse), 0)
        if "dsinks" in answers:
            answers["dsinks"] += np.where(one.rest > 0, one.rest * (dlse - inner), 0).sum((1, 2))
        if "dattn_mask" in answers:
            self._add_to_mask(answers["dattn_mask"], b, ds)
        ds = np.where(seen, ds * one.bend, 0)
        answers["dq"][one.queries] = one.scale * _product(ds, one.k, seen)
        back = seen.transpose(0, 2, 1)
        self._of_keys("dk", one, one.scale * _product(ds.transpose(0, 2, 1), one.q, back), answers)
        self._of_keys("dv", one, _product((p * one.kept).transpose(0, 2, 1), do, back), answers)

    def _of_keys(self, name, one, rows, answers):
        """Add up the rows of the query heads that share a head of keys."""
        answers[name][one.keys] = rows.reshape(len(rows) // one.group, one.group, *rows.shape[1:]).sum(1)

    # where things lie

    def _heads_first(self, t):
        """Return (B,H,S,·), or (H,T,·) for packed sequences."""
        if self.packed:
            return t.transpose(1, 0, 2)
        if self.rank == 4:
            return t if self.layout == "bhsd" else t.transpose(0, 2, 1, 3)
        return t[:, None] if self.rank == 3 else t[None, None]

    def _given_back(self, name, a):
        """Return an answer in the rank and layout of the call."""
        if name in ("dattn_mask", "dsinks"):
            return a
        columns = name not in ("lse", "key_weights")
        if self.packed:
            return a.transpose(1, 0, 2) if columns else a
        if self.rank == 4:
            return a.transpose(0, 2, 1, 3) if columns and self.layout == "bshd" else a
        return a[:, 0] if self.rank == 3 else a[0, 0]

    def _scaled(self, name):
        """Return k or v times its scale, in the shape that was given."""
        t, scale = self.given[name].astype(np.float64), self.given.get(name + "_scale")
        if scale is None or scale.ndim == 0:
            return t if scale is None else t * scale
        if scale.shape == t.shape[:-1]:
            return t * scale[..., None]
        # (B or 1, heads): one for each sequence and head
        if self.packed:
            ends = self.given["cu_seqlens_k"]
            per_token = np.concatenate(
                [np.repeat(scale[[b % len(scale)]], ends[b + 1] - ends[b], 0) for b in range(len(ends) - 1)]
            )
            return t * per_token[..., None]
        if self.rank == 4:
            return t * (scale[:, :, None, None] if self.layout == "bhsd" else scale[:, None, :, None])
        return t * (scale[:, :, None] if self.rank == 3 else scale)

    def _pages(self, name):
        """Return (B,Hk,pages·page_size,·): the keys of each sequence, in their order."""
        t, scale, table = (
            self.given[name].astype(np.float64),
            self.given.get(name + "_scale"),
            self.given["block_table"],
        )
        per_row = scale is not None and scale.ndim == 2
        if scale is not None and not per_row:
            t = t * (scale if scale.ndim == 0 else scale[..., None])
        if self.layout != "bhsd":
            t = t.transpose(0, 2, 1, 3)  # (n,Hk,page_size,·)
        size = t.shape[2]
        whole = np.zeros((len(table), t.shape[1], table.shape[1] * size, t.shape[3]))
        for b, length in enumerate(self.given["kv_lengths"]):
            for j in range(length):
                whole[b, :, j] = t[table[b, j // size], :, j % size]
        return whole * scale[:, :, None, None] if per_row else whole

    def _places(self, b):
        """Return where the queries and the keys of a sequence lie."""
        given = self.given
        if self.packed:
            queries = (slice(None), slice(*given["cu_seqlens_q"][b : b + 2]))
        else:
            queries = (b, slice(None), slice(0, given["q_lengths"][b] if "q_lengths" in given else None))
        if self.packed and not self.paged:
            return queries, (slice(None), slice(*given["cu_seqlens_k"][b : b + 2]))
        return queries, (b, slice(None), slice(0, given["kv_lengths"][b] if "kv_lengths" in given else None))

    def _mask(self, b, shape):
        """Return the mask of a sequence, (heads,sq,sk) after broadcasting."""
        mask = self.given.get("attn_mask")
        if mask is None:
            return None
        return np.broadcast_to(self._four(mask), (self.batch, len(self.q[0]), *self._widths()))[
            b, :, : shape[1], : shape[2]
        ]

    def _widths(self):
        return self.q.shape[-2], self.k.shape[-2]

    def _four(self, t):
        """Return a tensor that broadcasts to (B,Hq,·,·): one of fewer dimensions lacks the first ones, or the heads."""
        t = t.reshape((1,) * (min(self.rank, 4) - t.ndim) + t.shape)
        return t[:, None] if self.rank == 3 else t[None, None] if self.rank == 2 else t

    def _add_to_mask(self, total, b, ds):
        """Add the gradient of one sequence's scores to that of the mask; it is summed where the mask is broadcast."""
        four = self._four(total)  # a view
        part = four[b if len(four) > 1 else 0]
        for axis, size in enumerate(part.shape):
            if size == 1:
                ds = ds.sum(axis, keepdims=True)
        part[:, : ds.shape[1], : ds.shape[2]] += ds

    def _blocks(self, b, shape):
        blocks = self._four(self.given["block_mask"])
        blocks = blocks[b if len(blocks) > 1 else 0]
        rows, columns = (np.arange(n) // size for n, size in zip(shape[1:], self.options["block_size"], strict=True))
        return np.broadcast_to(blocks[:, rows[:, None], columns], shape)

    def _kept(self, b, shape):
        """Return the factor of each probability under dropout: 0, or 1/(1 − p)."""
        p = float(self.options["dropout_p"])
        if not p:
            return np.ones(shape)
        heads, sq, sk = shape
        counters = np.meshgrid(np.arange(heads), np.arange(sq), np.arange(-(-sk // 4)), indexing="ij")
        words = philox4x32_10(
            (counters[2], counters[1], counters[0], np.full_like(counters[0], b)), self.options["dropout_seed"]
        )
        words = np.stack(words, -1).reshape(heads, sq, -(-sk // 4) * 4)[..., :sk]
        return np.where(words / 2.0**32 >= p, 1 / (1 - p), 0)


def philox4x32_10(counter, seed):
    """Return the four 32-bit words of Philox4x32-10 (Salmon et al. 2011) for each counter, in uint64."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ np.uint64(k0), b & low, (a >> shift) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _product(weights, rows, seen):
    """Return weights @ rows, where what is not seen adds nothing, NaN and infinity included."""
    if np.isfinite(rows).all():
        return weights @ rows
    return np.where(seen[..., None], weights[..., None] * rows[:, None], 0).sum(2)


def tensors(*shape, dtype=torch.float32, n=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def close(actual, expected, bound=2e-6):
    """Check that no element is off by more than a share `bound` of the largest expected one."""
    actual = torch.as_tensor(actual).double()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= bound * expected.abs().max()
