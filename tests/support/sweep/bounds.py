"""Bounds of the errors of an answer, from the inputs alone: what rounding in float32 and in the data type may do.

Each bound is a first-order analysis of FlashAttention's formulas, element by element: an error of a score grows with
the magnitudes of its products; P and dS may be rounded to the type of q; sums are float32. Twice that is allowed.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.support import oracle

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
SMALLEST = {torch.float16: 2.0**-24}  # float16 has no smaller numbers
E = UNIT[torch.float32]
FUNCTION = 32 * E  # relative error of an exponential, and of the few operations around it
SLACK = 2.0
NO_ERROR = 1e-35  # AMX takes subnormal numbers as 0


def bounds(tensors, options, truth):
    """Return the largest errors of every answer in `truth`, which `oracle.answer` returned, except `key_weights`."""
    given = {name: oracle.array_of(t) for name, t in tensors.items() if t is not None}
    kept = {name: value for name, value in options.items() if name not in oracle.OTHERS}
    q = tensors["q"].dtype
    mask = tensors.get("attn_mask")
    with np.errstate(all="ignore"):
        one = _Bounds(given, oracle.MEANINGS | kept, UNIT[q], SMALLEST.get(q, 0.0))
        found = one.solve()
    truth = {name: t.numpy() for name, t in truth.items()}
    found["lse"] += 8 * E * np.abs(np.nan_to_num(truth["lse"], neginf=0, posinf=0))
    del found["key_weights"]
    for name, bound in found.items():
        dtype = mask.dtype if name == "dattn_mask" else torch.float32 if name in ("lse", "dsinks") else q
        if name == "dsinks":
            dtype = tensors["sinks"].dtype
        bound += UNIT[dtype] * np.abs(np.where(np.isfinite(truth[name]), truth[name], 0)) + SMALLEST.get(dtype, 0.0)
    return {name: torch.from_numpy(SLACK * bound + NO_ERROR) for name, bound in found.items()}


class _Bounds(oracle.Call):
    """Writes the errors of the answers where `Call` writes the answers."""

    def __init__(self, given, options, unit, smallest):
        super().__init__(given, options)
        self.unit, self.smallest = unit, smallest

    def _sequence(self, b, answers):
        one = self._probabilities(b)
        seen, group = one.seen, one.group
        p, kept = np.where(seen, one.p, 0), one.kept
        q, k, v = (np.abs(t) for t in (one.q, one.k, one.v))
        dim, value_dim, keys = q.shape[-1], v.shape[-1], max(p.shape[-1], 1)
        cap = float(self.options["softcap"])
        # of a score, its sum over D, then the softcap, ALiBi and the mask, each rounded
        of_score = E * ((dim + 8) * abs(one.scale) * (q @ k.transpose(0, 2, 1)) * np.abs(one.bend) + 8 * cap)
        of_score = np.where(seen, of_score + E * self._magnitudes(b, one), 0)
        of_lse = (p * of_score).sum(-1, keepdims=True) + FUNCTION
        of_p = p * (of_score + of_lse + self.unit) + self.smallest * seen
        of_p *= kept
        o = (p * kept) @ v
        of_o = of_p @ v + keys * E * o
        answers["o"][one.queries] = of_o
        answers["lse"][one.queries] = of_lse[..., 0]
        if self.do is None:
            return

        do = np.abs(self.do[one.queries])
        dlse = np.zeros_like(of_lse) if self.dlse is None else self.dlse[one.queries][..., None]
        # the gradient reads o and lse as the forward rounded them
        of_o = SLACK * (of_o + self.unit * o + self.smallest)
        of_lse = SLACK * (of_lse + 8 * E * np.abs(np.where(np.isfinite(one.lse), one.lse, 0)))
        dp = np.where(seen, do @ v.transpose(0, 2, 1), 0) * kept
        inner = (do * o).sum(-1, keepdims=True)
        of_inner = (do * of_o).sum(-1, keepdims=True) + (value_dim + 8) * E * inner
        whole = dp + inner + np.abs(dlse)
        of_ds = p * (of_score + of_lse + FUNCTION) * whole + p * ((value_dim + 8) * E * dp + of_inner + 8 * E * whole)
        of_ds = np.where(seen, of_ds, 0)
        exact = np.where(seen, self.do[one.queries] @ one.v.transpose(0, 2, 1), 0) * one.kept  # dp with its signs
        ds = np.where(seen, p * np.abs(exact - (p * exact).sum(-1, keepdims=True) + dlse), 0)
        if "dsinks" in answers:
            part = one.rest * ((of_lse + FUNCTION) * (inner + np.abs(dlse)) + of_inner)
            part += (len(p[0]) + 8) * E * one.rest * (inner + np.abs(dlse))
            answers["dsinks"] += np.where(one.rest > 0, part, 0).sum((1, 2))
        if "dattn_mask" in answers:
            self._add_to_mask(answers["dattn_mask"], b, of_ds + (p.shape[1] + keys) * E * ds)
        bend = np.abs(one.bend) + 16 * E
        rounded = bend * (of_ds + (self.unit + 8 * E) * ds) + self.smallest * seen
        if cap:  # the derivative of the softcap, 1 − tanh², from a rounded score
            rounded = rounded + ds * 2 * np.minimum(of_score / cap, 1)
        answers["dq"][one.queries] = abs(one.scale) * ((rounded + keys * E * ds) @ k)
        back, queries = (0, 2, 1), p.shape[1] * group
        sums = (rounded + queries * E * ds).transpose(back)
        self._of_keys("dk", one, abs(one.scale) * (sums @ q), answers)
        self._of_keys("dv", one, (of_p + p * kept * (of_lse + queries * E)).transpose(back) @ do, answers)

    def _magnitudes(self, b, one):
        """Return the magnitudes of what is added to a score, each of which rounds it."""
        total = 8 * np.abs(np.where(one.seen, one.s, 0))
        if "alibi_slopes" in self.given:
            slopes = self.given["alibi_slopes"]
            slopes = np.abs(slopes[b] if slopes.ndim == 2 else slopes)[:, None, None]
            total = total + 4 * slopes * (sum(one.s.shape[1:]) + np.abs(self._shift(b, one.s.shape)))
        mask = self._mask(b, one.s.shape)
        if mask is not None and mask.dtype != bool:
            total = total + 4 * np.abs(np.where(np.isfinite(mask), mask, 0))
        return total

    def _shift(self, b, shape):
        if "offset" in self.given:
            return int(self.given["offset"].reshape(-1)[b if self.given["offset"].size > 1 else 0])
        return shape[2] - shape[1]
