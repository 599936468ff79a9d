"""Find the known mistakes that reproduce the wrong numbers of one problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.exact.bounds import Limits
from flashpoint_kernels.judging.naming import mutants
from flashpoint_kernels.judging.naming.catalogue import TILES, known, of_gradients
from flashpoint_kernels.judging.naming.mutants import Mistake

LEFT = 0.08  # largest fraction of the error that may remain if a mistake explains it
FEW = 2  # with at most this many keys, too many mistakes give equal numbers
_FITTED = 4_000_000  # largest number of products q·k of a problem for which a score factor is fitted


@dataclass(frozen=True, eq=False)
class WrongNumbers:
    """A problem, bhsd, with its answers. `names`: the names of the wrong answers, in the order of OUTPUTS."""

    case: Case
    tensors: Mapping[str, Tensor]
    top_left: bool
    answers: Mapping[str, Tensor]
    limits: Mapping[str, Limits]
    names: tuple[str, ...]

    def with_mistake(self, mistake: Mistake, gradients: bool) -> dict[str, Tensor]:
        return mutants.answers(mistake, self.tensors, self.case, self.top_left, gradients)


def causes_of(w: WrongNumbers, earlier: Iterable[Mistake] = ()) -> list[Mistake]:
    """Return the mistakes that explain the wrong numbers; try those in `earlier`, found in other cases, first."""
    if w.case.kv_len <= FEW:
        return []
    if "o" not in w.names and "lse" in w.names:
        if (direct := of_the_numbers(w)) is not None:
            return [direct]
        if "o" in w.answers and excess(w, "o", w.answers["o"]) <= 1:  # a mistake of o would show in o
            return []
    kind = known if "o" in w.names or "lse" in w.names else of_gradients
    texts = {(mistake.code, mistake.text.partition(" (in ")[0]) for mistake in earlier}
    hits: list[Mistake] = []
    for each in (known, of_gradients) if texts else ():  # a mistake of the forward may show in gradients alone
        hits += matching(w, (m for m in each(w.case) if (m.code, m.text) in texts)) if not hits else ()
    hits = hits or list(matching(w, kind(w.case)))
    if "o" in w.names and all(mistake.code.startswith(("low-precision", "scale", "base-2")) for mistake in hits):
        hits = scaled(w, [mistake for mistake in hits if not mistake.code.startswith("low-precision")], texts) or hits
    if all(mistake.code.startswith("low-precision") for mistake in hits):
        direct = of_the_numbers(w) or _of_rows(w)
        return [direct] if direct is not None else hits
    return hits


def scaled(w: WrongNumbers, named: list[Mistake], earlier: Set[tuple[str, str]] = frozenset()) -> list[Mistake]:
    """Return mistakes in the scale that reproduce the wrong o: from `named`, from formulas, or a fitted factor.

    Fit one factor of the scores, on a grid of powers of 2 and then by golden-section search. Return the mistakes of
    `named`, and formulas such as 1/sqrt(Sk), that leave about as small a part of the error as the fitted factor. A
    formula of `earlier`, the codes and texts of mistakes in other cases, may leave as much as LEFT. If there are none,
    return the factor itself. If no factor fits, return `named`.
    """
    case = w.case
    if case.scores * case.head_dim > _FITTED or not bool(w.answers["o"].isfinite().all()):
        return named
    right = case.head_dim**-0.5 if case.scale is None else case.scale
    left = partial(left_by_factor, w)
    best = min(range(-8, 9), key=lambda power: left(2.0**power))
    low, high, golden = best - 1.0, best + 1.0, (math.sqrt(5) - 1) / 2
    for _ in range(24):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if left(2**a) < left(2**b) else (a, high)
    factor = 2 ** ((low + high) / 2)
    smallest_left = left(factor)
    if smallest_left > LEFT or abs(math.log2(factor)) > 8:  # beyond 2^±8, all weights are equal or one is 1
        return named
    allowed_left = min(LEFT, 2 * smallest_left + 0.01)
    sizes = {
        "Sk": case.kv_len, "Sq": case.q_len, "Hq": case.q_heads, "Hk": case.kv_heads, "B": case.batch,
        "(D + 1)": case.head_dim + 1, "(D - 1)": case.head_dim - 1, "(Hq · D)": case.q_heads * case.head_dim,
    }  # fmt: skip
    advice = "multiply q·k by the scale once: the given one, or 1/sqrt(D)"
    hits = [each for each in named if unexplained(w, "o", w.with_mistake(each, False)["o"]) < allowed_left]
    for name, size in sizes.items() if case.scale is None else ():
        text = f"the scale is 1/sqrt({name.strip('()')}), not 1/sqrt(D): "
        text += f"scores are sqrt(D/{name}) times the right ones"
        allowed = LEFT if ("scale", text) in earlier else allowed_left
        if size not in (1, case.head_dim) and left((case.head_dim / size) ** 0.5) < allowed:  # 1: no scale at all
            here = f"; the factor is {factor:.4g} where D is {case.head_dim} and {name} is {size}"
            hits.append(Mistake("scale", text, advice + here, {"scale": size**-0.5}))
    if hits:
        return hits
    return [Mistake("scale", f"scores are {factor:.3g} times the right ones", advice, {"scale": right * factor})]


def left_by_factor(w: WrongNumbers, factor: float) -> float:
    """Return the fraction of o's error that remains if all scores are multiplied by a factor."""
    if "o" not in w.names:
        return math.inf
    right = w.case.head_dim**-0.5 if w.case.scale is None else w.case.scale
    theirs = w.with_mistake(Mistake("scale", "", "", {"scale": right * factor}), False)
    return unexplained(w, "o", theirs["o"])


def _of_rows(w: WrongNumbers) -> Mistake | None:
    """Return a mistake that changes whole rows of o: NaN, or one factor for each row."""
    if "o" not in w.names or w.answers["o"].ndim != 4:
        return None
    answer, exact = w.answers["o"].double(), w.limits["o"].value
    lost = answer.isnan().any(-1)
    if bool(lost.any()):
        return _of_lost(w, lost, "NaN")
    zero = ~answer.any(-1) & exact.any(-1)
    if bool(zero.any()) and not bool((w.limits["o"].excess(w.answers["o"], w.case.dtype)[1] > 1)[~zero].any()):
        return _of_lost(w, zero, "0")
    if not bool(answer.isfinite().all()):
        return None
    factor = (answer * exact).sum(-1) / exact.square().sum(-1).clamp_min(1e-300)
    off = (answer - exact).norm()
    if float((answer - factor[..., None] * exact).norm()) > 0.1 * float(off):
        return None
    low, high = float(factor[exact.any(-1)].min()), float(factor[exact.any(-1)].max())
    text = f"each row of o has a factor, from {low:.6g} to {high:.6g}: the sum of weights is wrong, or its reciprocal"
    code = "low-precision-sum" if max(abs(low - 1), abs(high - 1)) < 0.02 else "row-factor"
    return Mistake(code, text, "keep the sum of weights and its reciprocal in float32, and add nothing to it")


def _of_lost(w: WrongNumbers, lost: Tensor, what: str) -> Mistake:
    """Return the mistake that makes the `lost` rows (B, Hq, Sq) NaN, or 0."""
    x = {n: t.double() if t.is_floating_point() else t for n, t in w.tensors.items()}
    seen = mutants.Forward(x, w.case, w.top_left, {}).scores()[1]
    for tile in TILES:
        hidden = ~seen[..., :tile].any(-1) & seen.any(-1)
        if bool(hidden.any()) and bool((lost == hidden).all()):
            text = f"rows are {what} whose first tile of {tile} keys is hidden: exp(-inf - (-inf))"
            return Mistake("nan", text, "subtract 0 in place of a maximum that is still -inf")
    empty = ~seen.any(-1)
    if bool(empty.any()) and not bool((lost & ~empty).any()):
        return Mistake("empty-rows", f"rows without keys are {what}", "write 0 where no key is visible")
    code, advice = ("nan", "look for 0 / 0 and inf - inf") if what == "NaN" else ("zero-rows", "write these rows")
    rows = lost.flatten(0, 1).any(0)
    return Mistake(code, f"o is {what} in {int(rows.sum())} of {len(rows)} rows", advice)


def matching(w: WrongNumbers, mistakes: Iterable[Mistake]) -> Iterator[Mistake]:
    """Yield the mistakes that reproduce the wrong numbers."""
    wrong_names = w.names
    forward = [n for n in wrong_names if not n.startswith("d")]
    names = forward[:1] or list(wrong_names)
    for mistake in mistakes:
        gradients = names[0].startswith("d")
        try:
            theirs = w.with_mistake(mistake, gradients)
        except (IndexError, RuntimeError):
            continue
        left = max(unexplained(w, n, theirs.get(n)) for n in names)
        low = mistake.code.startswith("low-precision") or mistake.code == "tf32"
        if left > (0.5 if low else LEFT):
            continue
        # All other outputs that the mistake changes must also be wrong.
        others = [n for n in w.answers if gradients and n not in wrong_names and n in theirs and n in w.limits]
        if all(excess(w, n, theirs[n]) <= 3 for n in others):
            yield mistake
        elif mistake.backward:
            yield replace(mistake, text=f"{mistake.text} (in {', '.join(names)} alone)")


def foretold(w: WrongNumbers, mistake: Mistake) -> Literal["wrong", "right", "refuted"] | None:
    """Compare the answers of one case with what a mistake predicts for it, element by element.

    Return `wrong` if the wrong elements, and no others, have the predicted values; `right` if none is wrong, and none
    predicted to be; `refuted` if the answers are right, but the mistake predicts an error; None if the mistake cannot
    occur in the case, or gives other numbers.
    """
    text, _, alone = mistake.text.partition(" (in ")
    listed = known(w.case) if mistake.forward else of_gradients(w.case)
    same = next((each for each in listed if (each.code, each.text) == (mistake.code, text)), None)
    if same is None:
        return None
    try:
        theirs = w.with_mistake(same, bool(same.backward))
    except (IndexError, RuntimeError):
        return None
    names = ["o"] if same.forward else [n for n in ("dq", "dk", "dv") if not alone or n in alone]
    found: Literal["wrong", "right"] = "right"
    for name in (n for n in names if n in theirs and n in w.answers and n in w.limits):
        answer, limits, their = w.answers[name].double(), w.limits[name], theirs[name]
        if their.shape != answer.shape:
            return None
        wrong = limits.excess(w.answers[name], w.case.dtype)[1] > 1
        predicted = limits.excess(their.to(w.answers[name].dtype), w.case.dtype)[1]
        if not bool(wrong.any()):
            if bool((predicted > 3).any()):
                return None if w.names else "refuted"
            continue
        low = mistake.code.startswith("low-precision") or mistake.code == "tf32"
        near = (0.5 if low else 0.1) * (answer - limits.value).abs() + 2 * limits.allowed
        alike = ((answer - their).abs() <= near) | (~answer.isfinite() & ~their.isfinite())
        if float(alike[wrong].double().mean()) < 0.95 or float((predicted > 3)[~wrong].double().mean()) > 0.02:
            return None
        found = "wrong"
    return found


def excess(w: WrongNumbers, name: str, theirs: Tensor) -> float:
    """Return the largest error of `theirs`, the answer that a mistake gives, as a multiple of the bound L."""
    ratios = w.limits[name].excess(theirs.to(w.answers[name].dtype), w.case.dtype)[1]
    return float(ratios.max()) if ratios.numel() else 0.0


def unexplained(w: WrongNumbers, name: str, theirs: Tensor | None) -> float:
    """Return the fraction of an answer's error that a mistake does not explain: 0 if it gives the same numbers."""
    if theirs is None:
        return math.inf
    answer, exact = w.answers[name].double(), w.limits[name].value
    if theirs.shape != answer.shape:
        return math.inf
    if not bool(answer.any()) and bool(theirs.any()):  # only exact zeros explain zeros, not small numbers
        return math.inf
    odd = ~answer.isfinite()
    if bool(odd.any()) or bool((~theirs.isfinite()).any()):
        same = (odd == ~theirs.isfinite()) | (exact.isinf())
        if float(same.double().mean()) < 0.98:
            return math.inf
        both = answer.isfinite() & theirs.isfinite() & exact.isfinite()
        if not bool(both.any()) or float((answer - exact)[both].norm()) == 0:
            return 0.0
        answer, exact, theirs = answer[both], exact[both], theirs[both]
    finite = answer.isfinite() & exact.isfinite() & theirs.isfinite()
    off = float((answer - exact)[finite].norm())
    if off == 0:
        return math.inf
    return float((answer - theirs)[finite].norm()) / off


def of_the_numbers(w: WrongNumbers) -> Mistake | None:
    """Return a mistake that shows in the wrong numbers themselves: a factor, a shift, zeros or a transposed answer."""
    name = "o" if "o" in w.names else w.names[0]
    answer, exact = w.answers[name].double(), w.limits[name].value
    finite = answer.isfinite() & exact.isfinite()
    a, e = answer[finite], exact[finite]
    largest = float(e.abs().max()) if e.numel() else 0.0

    def near(t: Tensor) -> bool:
        return bool((t - e).abs().max() <= 1e-3 * largest) if e.numel() and largest else False

    if name == "lse" and "o" not in w.names:
        if near(a * math.log(2)):
            return Mistake("lse-base-2", "lse is in base 2", "multiply it by ln 2")
        if near(-a):
            return Mistake("lse-sign", "lse has the wrong sign",
                "return the natural logarithm of the sum, plus the maximum")  # fmt: skip
        shift = a - e
        if (
            e.numel() > 1
            and float(shift.std()) < 1e-3 * max(1.0, float(shift.abs().mean()))
            and float(shift.abs().mean()) > 1e-2
        ):
            return Mistake("lse-shift", f"lse is off by {float(shift.mean()):.4g} everywhere",
                "return the natural logarithm of the sum, plus the maximum")  # fmt: skip
        scale = w.case.head_dim**-0.5 if w.case.scale is None else w.case.scale
        for factor, what in ((scale, "the scale is applied to it"), (1 / scale, "it lacks the scale")):
            if near(a / factor):
                return Mistake("lse-scale", f"lse is off by a factor: {what}",
                    "return the natural logarithm of the sum, plus the maximum")  # fmt: skip
    if answer.ndim == 4 and name == "o" and answer.shape[1] != answer.shape[2]:
        turned = exact.transpose(1, 2).reshape(answer.shape)
        told = largest and bool((exact - turned).abs().max() > 0.1 * largest)
        if told and bool((answer - turned).abs().nan_to_num(nan=math.inf).max() <= 1e-3 * largest):
            advice = "o must be (B, Hq, Sq, Dv) in layout bhsd"
            return Mistake("transposed", "heads and rows are transposed in memory", advice)
    if largest and not bool(answer.any()) and name != "o":
        return Mistake("gradient-zero", f"{name} is 0 everywhere", "write it")
    factor = float(a @ e / (e @ e)) if largest else 0.0
    if factor and abs(factor - 1) > 2e-3 and near(a / factor) and name.startswith("d") and len(w.names) == 1:
        scale = w.case.head_dim**-0.5 if w.case.scale is None else w.case.scale
        why = ": the scale is missing" if math.isclose(factor, 1 / scale, rel_tol=2e-3) else ""
        return Mistake("gradient-factor", f"{name} is {factor:.4g} times the right one{why}",
            "ds is multiplied by the scale once, for dq and for dk; dv has none")  # fmt: skip
    return None
