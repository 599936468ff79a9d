"""`merge`: attention over all keys, from its parts over some of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashpoint_contract.options import ProblemError
from flashpoint_kernels.problems.memory import check_memory


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Return (o, lse) of attention over all keys, from those of parts that have some of the keys each.

    Each part is a call of `attention` with the same queries and `return_lse=True`. With p the part's share of the
    softmax's denominator, exp(lse of the part − lse), o is the sum of p·o over the parts. It is computed in float32.
    The parts may be merged in any order, and results of `merge` merged again.

    A sink belongs to one part, because it is one more logit of the whole softmax. Dropout cannot be split: its
    dropped weights are those of a key's index in the call.

    Args:
        outputs: o of each part, (B, Hq, Sq, Dv) in layout `bhsd`, (B, Sq, Hq, Dv) in `bshd`, (Tq, Hq, Dv) in `thd`; or
            (B, Sq, Dv) and (Sq, Dv). One dtype and shape.
        lses: lse of each part, float32, as `attention` returns it: (B, Hq, Sq), (Hq, Tq) in `thd`, (B, Sq) or (Sq,).
        layout: Layout of the outputs.

    Returns:
        o in the parts' dtype and shape, and lse in float32. Where no part sees a key, 0 and −∞. A part whose lse is −∞
        adds nothing, whatever its o is there.

        Differentiable in outputs and lses, any number of times.

    Raises:
        ProblemError: a ValueError whose `errors` name what does not fit.
    """
    if has_torch_function((*outputs, *lses)):
        answer: tuple[Tensor, Tensor] = handle_torch_function(merge, (*outputs, *lses), outputs, lses, layout=layout)
        return answer
    check_memory(
        **{f"{name}[{n}]": t for name, part in (("outputs", outputs), ("lses", lses)) for n, t in enumerate(part)}
    )
    turned = _turned(outputs, lses, layout)
    largest = torch.stack([lse.detach().float() for lse in lses]).amax(0)
    largest = torch.where(largest.isneginf(), 0.0, largest)  # gradients through the maximum cancel
    weights = [(lse.float() - largest).exp() for lse in lses]
    total = torch.stack(weights).sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), largest + total.log())
    o = torch.zeros((), dtype=torch.float32, device=outputs[0].device)
    for part, part_lse, weight in zip(outputs, lses, weights, strict=True):
        share = weight / total
        share = (share.transpose(-1, -2) if turned else share)[..., None]
        without = (part_lse.transpose(-1, -2) if turned else part_lse)[..., None].isneginf()
        o = o + share * torch.where(without, 0.0, part.float())
    return o.to(outputs[0].dtype), lse


def _turned(outputs: Sequence[Tensor], lses: Sequence[Tensor], layout: str) -> bool:
    """Return whether rows precede heads in outputs, in contrast to lses. Raises ProblemError."""
    if layout not in ("bhsd", "bshd", "thd"):
        raise ProblemError([("layout", f"must be bhsd, bshd or thd, not {layout!r}")])
    if not len(outputs) == len(lses) > 0:
        raise ProblemError([("lses", f"must be as many as outputs, at least 1, not {len(lses)} for {len(outputs)}")])
    first = outputs[0]
    for n, (o, lse) in enumerate(zip(outputs, lses, strict=True)):
        if (o.shape, o.dtype) != (first.shape, first.dtype):
            shown = f"{list(o.shape)} {o.dtype}, but outputs[0] is {list(first.shape)} {first.dtype}"
            raise ProblemError([(f"outputs[{n}]", f"is {shown}")])
        rows = list(o.shape[:-1])
        turned = (layout == "thd" and o.ndim == 3) or (layout == "bshd" and o.ndim == 4)
        if turned:
            rows[-2:] = rows[:-3:-1]
        if list(lse.shape) != rows:
            raise ProblemError(
                [(f"lses[{n}]", f"must be {rows} for outputs of {list(o.shape)}, not {list(lse.shape)}")]
            )
    return turned
