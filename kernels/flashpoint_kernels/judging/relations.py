"""Test properties other than accuracy: purity, memory forms, repeatability, and properties that are only reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashpoint_contract.judging import Property
from flashpoint_kernels.judging import values
from flashpoint_kernels.judging.cases import BASE, OUTPUTS, Case, reseeded
from flashpoint_kernels.judging.exact.bounds import Limits
from flashpoint_kernels.judging.exact.gain import Gain
from flashpoint_kernels.judging.trial import Outcome, Trial

_SECOND = ("ddq", "ddk", "ddv")
VIEWS = ("transposed", "rows", "strided", "offset", "misaligned", "columns")
_ROUNDS = 4  # of calls in two threads at once
_VIEWED = {
    "transposed": "transposed inputs", "rows": "inputs that are rows of a wider tensor",
    "strided": "inputs with a strided last dimension", "offset": "inputs at an offset of their storage",
    "misaligned": "inputs at an address that is not aligned", "columns": "inputs in column order",
}  # fmt: skip


def base(dtype: str, seed: int, **more: object) -> Case:
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
    return Case(**dict(zip(names, (*BASE, BASE[-1]), strict=True)), dtype=dtype, seed=seed, **more)  # type: ignore[arg-type]


def chosen(trial: Trial, dtypes: tuple[str, ...], seed: int) -> list[Case]:
    """Return the cases for testing relations: one that the function accepts, for each of at most two data types."""
    kept = []
    for dtype in dtypes:
        first = base(dtype, seed)
        tries = [first, replace(first, kv_heads=4, q_len=64, kv_len=64)]
        if trial.shapes:
            tries += [trial.shapes.project(each) for each in tries]
        for case in map(trial.signature.fit, tries):
            if trial.signature.refuses(case) is None and trial.run(case).status in ("right", "imprecise", "wrong"):
                kept.append(case)
                break
    return list({case.dtype: case for case in kept}.values())[:2]


def purity(trial: Trial, case: Case) -> Iterator[Outcome]:
    """Yield calls that test purity and memory forms. Each answer is compared with its bounds."""
    for each, relation, mode in _pure(trial, case):
        fitted = trial.fitted(each)
        if fitted is not None:
            yield trial.run(fitted, relation, **mode)
    yield from shared_memory(trial, case)
    yield from contexts(trial, case)


def shared_memory(trial: Trial, case: Case) -> Iterator[Outcome]:
    """Yield calls whose inputs share memory, or have strides of 0."""
    s = trial.signature
    if s.packed:
        return
    square = replace(case, kv_heads=case.q_heads, kv_len=case.q_len)
    for each in (case, square, replace(square, causal="causal" in s.options)):
        if (fitted := trial.fitted(each)) is None:
            continue
        tensors = values.draw(fitted)
        yield trial.run(fitted, "inputs in one storage", memory="storage")
        if tensors["q"].shape == tensors["k"].shape == tensors["v"].shape:
            yield trial.run(fitted, "inputs that are rows of one tensor", memory="rows")
        if tensors["k"].shape == tensors["v"].shape and not s.ragged:
            yield trial.run(fitted, "v that is k", change={"v": tensors["k"]}, memory="v is k")
            yield trial.run(fitted, "v that is k", change={"v": tensors["k"]}, memory="v is k", leaves=[])
        for axis, letter in enumerate("bh"):
            if s.ragged or letter not in s.layout or tensors["k"].shape[axis] < 2:
                continue
            form = "batch" if letter == "b" else "heads"
            for names in (("k", "v"), ("q",), ("do",)):
                same = {n: tensors[n].narrow(axis, 0, 1).expand(tensors[n].shape).contiguous() for n in names}
                relation = "a gradient of o in another memory form" if names == ("do",) else "inputs with a stride of 0"
                yield trial.run(fitted, relation, change=same, memory=f"{form} {' '.join(names)}")
                if names != ("do",):
                    yield trial.run(fitted, relation, change=same, memory=f"{form} {' '.join(names)}", leaves=[])
    if "attn_mask" in s.options:
        for view in ("transposed", "strided", "offset", "columns"):
            masked = trial.fitted(replace(case, mask="float-one" if view in ("offset", "strided") else "bool"))
            if masked is not None:
                yield trial.run(masked, "a mask in another memory form", views={"attn_mask": view})
        masked = trial.fitted(replace(case, mask="float-heads"))
        if masked is not None and "h" in s.layout:
            mask = values.draw(masked)["attn_mask"]
            mask = mask[:, :1].expand(mask.shape).contiguous()
            yield trial.run(
                masked, "a mask in another memory form", change={"attn_mask": mask}, memory="heads attn_mask"
            )


def contexts(trial: Trial, case: Case) -> Iterator[Outcome]:
    """Yield calls in other contexts: threads, modes of torch, several layers, inputs that change."""
    other = reseeded(case, case.seed + 9)
    yield from trial.together(case, other, "two forwards before their backwards")
    yield trial.run(case, "inference mode", inference_mode=True, leaves=[])
    yield trial.run(case, "another thread", threads=True)
    yield trial.run(case, "another thread", threads=True, leaves=[])
    if not trial.interpreted:
        yield from _at_once(trial, case, other)
    outcome = trial.run(case, "inputs that change before the backward", zeroed=True)
    if "grad_error" in outcome.facts:  # an error tells the caller
        outcome.status, outcome.text = "right", ""
    yield outcome
    if case.dtype == "bfloat16" and trial.signature.style != "sdpa":
        for forward in (False, True):
            outcome = trial.run(replace(case, forward=forward), "autocast", autocast="bfloat16")
            if "o" in outcome.excess and not outcome.failed:  # bounds for products in bfloat16 hide a factor
                gain = Gain("o", case.dtype)
                gain.add(outcome.answers["o"], outcome.limits["o"].value, None)
                if gain.verdict == "wrong":
                    outcome.status, outcome.text = "wrong", str(gain)
            yield outcome


def _at_once(trial: Trial, case: Case, other: Case) -> Iterator[Outcome]:
    """Yield calls on two cases in two threads at once, until one fails: a race need not show in each round."""
    plain, less = (replace(each, forward=True) for each in (case, other))
    for first, second in ((case, other), (plain, less), (other, case), (less, plain)) * _ROUNDS:
        outcomes = trial.together(first, second, "two threads at once", threads=True)
        yield from outcomes
        if any(outcome.failed for outcome in outcomes):
            return


def compiled(trial: Trial, case: Case) -> Iterator[Outcome | Property]:
    """Yield calls under torch.compile, if it can trace the function."""
    if trial.interpreted:
        return
    for each in (case, reseeded(case, case.seed + 3), replace(case, causal="causal" in trial.signature.options)):
        outcome = trial.run(each, "torch.compile", compile=True)
        if outcome.status in ("refused", "ended") or "grad_error" in outcome.facts:
            yield Property("compile", "not tested", f"torch.compile: {outcome.text[:200]}")
            return
        yield outcome


def other_derivatives(trial: Trial, case: Case) -> Iterator[Outcome | Property]:
    """Yield a second derivative, and a call in float64, each of which a function may refuse."""
    if (fitted := trial.fitted(replace(case, dtype="float64"))) is not None:
        double = replace(fitted, dtype="float64")
        outcome = trial.run(double, "float64")
        if outcome.failed and outcome.status != "ended":  # it holds no more than float32 does
            outcome.status = "imprecise"
            yield outcome
            yield Property("float64", "fails", "inputs in float64 are accepted, but computed with less: refuse them")
    g = torch.Generator("cpu").manual_seed(case.seed)
    tensors = values.draw(case)
    if trial.signature.packed or trial.signature.ragged or case.dtype != "float32":
        return
    tops = {f"dd{n}": torch.randn(tensors[n].shape, generator=g, dtype=torch.float32, device="cpu") for n in "qkv"}
    second = {f"d{n}": f"dd{n}" for n in "qkv"}
    outcome = trial.run(case, "a second derivative", change=tops, second=second, leaves=["q", "k", "v", "do"])
    outcome.status = "right"  # the gradient of do, and errors, are no failures here
    if outcome.facts.get("second") and "grad_error" not in outcome.facts and not any(
        bool(t.any()) for n, t in outcome.answers.items() if n in _SECOND
    ):  # fmt: skip
        outcome.status, outcome.text = "wrong", "a second derivative is 0: mark the backward as differentiable once"
        yield outcome


def _pure(trial: Trial, case: Case) -> Iterator[tuple[Case, str, dict[str, Any]]]:
    other, third = (reseeded(case, case.seed + n) for n in (1, 2))
    yield case, "repeated calls", {}
    yield other, "new inputs at the same address", {"reuse": True}
    yield third, "new inputs of the same shape", {}
    yield case, "repeated calls", {"no_grad": True, "leaves": []}
    yield other, "new inputs at the same address", {"no_grad": True, "leaves": [], "reuse": True}
    longer = reseeded(replace(case, q_len=case.q_len + 17, kv_len=case.kv_len - 9, batch=case.batch + 1), case.seed)
    yield longer, "another shape after this one", {}
    yield third, "a shape again after another", {}
    for view in VIEWS:
        views = dict.fromkeys(("q", "k", "v", "qkv", "kv"), view)
        yield case, _VIEWED[view], {"views": views, "leaves": []}
        yield other, _VIEWED[view], {"views": views | {"do": view}}
    for name in ("q", "k", "v"):
        for view in ("transposed", "rows"):
            yield case, f"{_VIEWED[view]} ({name} alone)", {"views": {name: view}}
    for view in ("transposed", "strided", "rows", "misaligned"):
        yield case, "a gradient of o in another memory form", {"views": {"do": view}}
    ones = replace(case, ones=True)
    yield ones, "the gradient of a sum, one number in memory", {"views": {"do": "expanded"}}
    if not trial.signature.packed:
        for name in ("q", "k", "v"):
            yield other, f"a gradient of {name} alone", {"leaves": [name]}
        yield case, "gradients of q and k alone", {"leaves": ["q", "k"]}
    yield case, "a second backward", {"twice": True}
    yield other, "memory that is not initialised", {"poison": True}
    if trial.worker.device == "cuda":
        yield other, "another stream", {"stream": True}
    if "causal" in trial.signature.options and not trial.signature.refuses(replace(case, causal=True)):
        causal = replace(case, causal=True)
        views = dict.fromkeys(("q", "k", "v", "do"), "offset")
        yield causal, "inputs at an offset of their storage", {"views": views}
        yield causal, "memory that is not initialised", {"poison": True}
        yield case, "no mask after a causal call", {}
        wider = reseeded(replace(causal, q_len=case.q_len + 17, kv_len=case.kv_len + 9), case.seed)
        yield wider, "another shape after this one", {"leaves": []}
        yield causal, "a shape again after another", {"leaves": []}


def batch_invariant(trial: Trial, case: Case) -> Property:
    """Compare a sequence's bits in a batch with its bits in a call of its own."""
    name = "batch-invariant"
    if trial.signature.ragged or case.batch < 2:
        return Property(name, "not tested", "the function has no batch of this shape")
    whole = trial.run(case, name, leaves=[])
    last = {n: t[-1:] for n, t in values.draw(case).items()}
    alone = trial.run(replace(case, batch=1), name, change=last, leaves=[])
    if "o" not in whole.answers or "o" not in alone.answers:
        return Property(name, "not tested", "the function refused the shape")
    if torch.equal(whole.answers["o"][-1:], alone.answers["o"]):
        return Property(name, "holds", "a sequence has the same bits alone and in a batch")
    return Property(name, "fails", "the bits of a sequence depend on its batch")


def masked_nan(trial: Trial, case: Case) -> Property:
    """Put NaN into keys and values that are hidden from most rows, and check that these rows stay finite."""
    name = "masked-nan"
    causal = replace(case, causal=True)
    if "causal" not in trial.signature.options or trial.signature.refuses(causal):
        return Property(name, "not tested", "the function has no mask")
    tensors = values.draw(causal)
    spoilt = {n: tensors[n].clone() for n in "kv"}
    top_left = trial.signature.top_left
    at = min(causal.q_len, causal.kv_len) - 1 if top_left else causal.kv_len - 1
    for t in spoilt.values():
        t[:, :, at:] = math.nan
    first = trial.run(causal, name, leaves=[])
    known = {n: Limits(x.value, x.accurate, torch.full_like(x.allowed, math.inf)) for n, x in first.limits.items()}
    outcome = trial.run(
        causal, name, change=spoilt, known=(known, torch.zeros(0, dtype=torch.bool, device="cpu")), leaves=[]
    )
    if "o" not in outcome.answers or trial.signature.ragged:
        return Property(name, "not tested", "the function refused it")
    rows = outcome.answers["o"][:, :, : at if top_left else -1]
    if not rows.shape[2] or bool(rows.isfinite().all()):
        return Property(name, "holds", "NaN in a key reaches only the rows that see it")
    return Property(name, "fails", "NaN in a key reaches rows that may not see it")


def lse_gradient(trial: Trial, case: Case) -> tuple[Property, Outcome | None]:
    """Check the gradient of lse, if autograd offers one."""
    name = "lse-gradient"
    outcome = trial.run(case, name)
    if (
        "lse" not in outcome.answers
        or not outcome.facts.get("lse_grad")
        or trial.signature.ragged
        or trial.signature.base_2
    ):
        return Property(name, "not tested", "the function offers no gradient of lse"), None
    tensors = values.draw(case)
    generator = torch.Generator("cpu").manual_seed(case.seed + 5)
    dlse = torch.randn(tensors["q"].shape[:3], generator=generator, dtype=torch.float32, device="cpu")
    outcome = trial.run(case, name, change={"dlse": dlse}, dlse=True)
    if outcome.status in ("right", "imprecise"):
        return Property(name, "holds", "the gradient of lse is right"), None
    ignored = trial.run(case, name)
    same = all(
        torch.equal(outcome.answers[n], ignored.answers[n])
        for n in ("dq", "dk")
        if n in outcome.answers and n in ignored.answers
    )
    if same and outcome.answers:
        return Property(
            name, "fails", "the backward ignores the gradient of lse: mark lse as not differentiable, or use it"
        ), None
    return Property(name, "fails", "the gradient of lse is wrong"), outcome


def repeats(
    trial: Trial, cases: list[Case], seconds: float, tell: Callable[[str], None]
) -> Iterator[Outcome | tuple[int, bool, bool]]:
    """Repeat calls. Yield wrong outcomes, and for each case the number of calls and whether bits differed."""
    for number, case in enumerate(cases):
        tell("repeated calls")
        within = max(0.05, seconds / len(cases))
        for outcome, calls, forward, gradient in repeated(trial, case, within, 1 << 16 if number == 0 else 1 << 12):
            if outcome is not None:
                yield outcome
            yield calls, forward, gradient


def repeated(trial: Trial, case: Case, within: float, times: int) -> Iterator[tuple[Outcome | None, int, bool, bool]]:
    first = trial.run(case, "repeated calls")
    if first.status in ("refused", "ended"):
        yield (first if first.failed else None), 0, False, False
        return
    outcome, others = trial.repeat(case, within, times)
    facts = outcome.facts
    for each in others:
        if each.status == "wrong":
            share = max(1, facts.get("forward", 0), facts.get("gradient", 0)) / max(1, facts.get("calls", 1))
            each.relation = "repeated calls"
            each.text = f"{share:.0%} of {facts.get('calls', 0)} equal calls gave other numbers"
            facts["always"] = share > 0.9
            each.facts = facts
            yield each, 0, False, False
            break
    if outcome.failed:
        yield outcome, 0, False, False
    yield None, facts.get("calls", 0), facts.get("forward", 0) > 0, facts.get("gradient", 0) > 0


def gains(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Yield answers that are too large or too small by a factor over all calls of a type, or with an option."""
    sums: dict[tuple[str, str, str], Gain] = {}
    largest: dict[tuple[str, str, str], Outcome] = {}
    for o in outcomes:
        if o.relation != "accuracy" or o.case.values != "normal" or o.case.dtype == "float32" or o.failed:
            continue
        for name in (n for n in OUTPUTS if n in o.excess and o.answers[n].shape == o.limits[n].value.shape):
            for option in ("", *o.case.options):
                key = (name, o.case.dtype, option)
                well = None if name in ("dk", "dv") or o.ill_rows is None else ~o.ill_rows
                sums.setdefault(key, Gain(name, o.case.dtype)).add(o.answers[name], o.limits[name].value, well)
                if key not in largest or largest[key].case.scores < o.case.scores:
                    largest[key] = o
    found = {key: gain for key, gain in sums.items() if gain.verdict != "right"}
    for (name, dtype, option), gain in found.items():
        if option and (name, dtype, "") in found:
            continue
        text = f"{gain}{f', with {option}' if option else ''}"
        nothing: dict[str, Any] = {"mode": None, "answers": {}, "excess": {}, "strict": {}}
        yield replace(largest[name, dtype, option], relation="gain", status=gain.verdict, text=text, **nothing)
