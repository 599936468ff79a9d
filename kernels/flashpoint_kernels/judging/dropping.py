"""Test dropout, whose weights no seed of the judge's decides: how many are kept, their factor, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashpoint_contract.judging import Property
from flashpoint_kernels.judging import values
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.exact.bounds import Limits
from flashpoint_kernels.judging.trial import Outcome, Trial
from flashpoint_kernels.problems.problem import DTYPES

_CASES = ((0.3, 64, "float32"), (0.1, 128, "bfloat16"), (0.5, 64, "float16"))  # probability, Sk = D = Dv, data type
_SURE = 5.0  # standard deviations of the number of kept weights
_STEP = 1 / 256  # some kernels draw 8 bits for each weight
_GRADIENT = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}  # largest relative error of a gradient's norm


def dropout(trial: Trial, dtypes: tuple[str, ...], seed: int) -> Iterator[Outcome | Property]:
    """Yield calls with dropout whose values are a unit matrix, so that o shows the weights that dropout keeps."""
    s = trial.signature
    if "dropout_p" not in s.takes or s.packed or s.ragged:
        return
    for p, size, dtype in _CASES:
        case = Case(batch=2, q_heads=4, kv_heads=2, q_len=70, kv_len=size, head_dim=size, value_dim=size, dtype=dtype,
                    seed=seed, dropout=p)  # fmt: skip
        fitted = trial.fitted(case)
        if dtype not in dtypes or fitted is None or fitted.kv_len != fitted.value_dim:
            continue
        yield from _dropped(trial, fitted)


def _dropped(trial: Trial, case: Case) -> Iterator[Outcome | Property]:
    p, unit = case.dropout, torch.eye(case.kv_len, dtype=DTYPES[case.dtype], device="cpu")
    tensors = values.draw(case)
    change = {"v": unit.expand(tensors["v"].shape).contiguous()}
    plain = trial.run(replace(case, dropout=0.0), "dropout", change=change)
    if "o" not in plain.limits or plain.failed:
        return
    open_limits = {
        n: Limits(x.value, x.accurate, torch.full_like(x.allowed, math.inf)) for n, x in plain.limits.items()
    }
    none = torch.zeros(0, dtype=torch.bool, device="cpu")
    outcome = trial.run(case, "dropout", change=change, known=(open_limits, none))
    if outcome.status == "refused" or "o" not in outcome.answers:
        return
    o, exact, allowed = outcome.answers["o"].double(), plain.limits["o"].value, plain.limits["o"].allowed
    kept = o > exact / 2
    if bool(kept.all()):
        yield Property("dropout", "fails", "dropout_p is ignored: every weight is kept")
        return
    factor = 1 / (1 - p)
    share, room = float(kept.double().mean()), _SURE * math.sqrt(p * (1 - p) / kept.numel()) + _STEP
    outcome.status, outcome.text = "right", ""
    if abs(share - (1 - p)) > room:
        outcome.text = f"with dropout_p={p}, {share:.1%} of the weights are kept, not {1 - p:.1%}"
    elif bool(((o - kept * exact * factor).abs() > factor * allowed).any()):
        actual = float((o / exact)[kept].median())
        outcome.text = f"with dropout_p={p}, kept weights are multiplied by {actual:.3g}, not {factor:.3g}"
    else:
        outcome.text = _gradients(outcome, tensors | change, kept * factor)
    outcome.status = "wrong" if outcome.text else "right"
    yield outcome


def _gradients(outcome: Outcome, tensors: dict[str, Tensor], kept: Tensor) -> str:
    """Return which gradients do not belong to the weights that the forward kept; "" if all do."""
    case = outcome.case
    q, k, v = (tensors[n].double().requires_grad_() for n in "qkv")
    heads = [t.repeat_interleave(case.group, 1) for t in (k, v)]
    o = ((q @ heads[0].mT * case.head_dim**-0.5).softmax(-1) * kept) @ heads[1]
    exact = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), tensors["do"].double()), strict=True))
    errors = {n: (outcome.answers[n].double() - t).norm() / t.norm() for n, t in exact.items() if n in outcome.answers}
    off = [n for n, error in errors.items() if not float(error) < _GRADIENT[case.dtype]]
    return f"{', '.join(off)} do not belong to the weights that the forward kept" if off else ""
