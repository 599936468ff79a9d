"""Judge a function: run the cases and the relations, find causes, shrink, and write the report."""

from __future__ import annotations

import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flashpoint_contract.judging import (
    LAYOUTS,
    REQUIREMENTS,
    Cause,
    NotJudged,
    Property,
    Race,
    Report,
    Standing,
    Verdict,
)
from flashpoint_kernels.judging import cases, dropping, relations, shapes, shrinking, signatures
from flashpoint_kernels.judging.cases import OUTPUTS, TYPES, Case, reseeded, varied
from flashpoint_kernels.judging.naming import causes
from flashpoint_kernels.judging.process import EndedError, NotLoadedError, Worker, target_of, trim, unreadable
from flashpoint_kernels.judging.signatures import UnusableError
from flashpoint_kernels.judging.trial import Clock, Outcome, StopError, Trial

QUICK_SECONDS, SECONDS = 120.0, 600.0  # time limit of a judgement, including the function's own time
_FOR_THE_CAUSE = 0.1  # fraction of the time limit that is kept for finding the cause of failures
_INTERPRETED = "Triton's interpreter computes with the bit patterns of bfloat16"
REPEATS, QUICK_REPEATS = 12.0, 1.5  # seconds for calls that are repeated with the same inputs
AHEAD = 6  # number of coming cases whose exact answers are computed while the function runs


@dataclass(frozen=True)
class Progress:
    """The progress of a judgement: cases done, number of cases, and the current step."""

    done: int
    total: int
    stage: str


def judge(
    function: Callable[..., Any] | str,
    *,
    quick: bool = False,
    dtype: str | Sequence[str] = (),
    layout: str | None = None,
    causal_alignment: str | None = None,
    empty_rows: str | None = None,
    precision: str = "ieee",
    require: str | Sequence[str] = (),
    seed: int | None = None,
    seconds: float | None = None,
    timeout: float | None = None,
    device: str | None = None,
    only: Mapping[str, Any] | None = None,
    save: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    dtypes: str | Sequence[str] = (),
) -> Report:
    """Judge an attention function against float64: accuracy, purity, repeatability, and the causes of what is wrong.

    The function runs in a process of its own, so that a crash of the function does not end the judge.

    Args:
        function: Called as function(q, k, v, causal=…, …) with torch tensors; or its name, MODULE:FUNCTION. Parameters
            of flash-attn, SDPA, FlashInfer and `flashpoint_kernels.attention` are recognised, and so are their layouts.
        quick: Run fewer cases: about 10 seconds of the judge's own work in place of 60.
        dtype: Data type to judge, or several, of float32, bfloat16 and float16; by default all three.
        layout: Layout of q, k and v: bhsd, bshd, sbhd, shd, hsd, bsd or sd. By default it is found by trial calls.
        causal_alignment: top_left or bottom_right; by default bottom_right, and top_left for `is_causal`.
        empty_rows: Required output of rows without keys: `zero`, or `nan`, which also accepts NaN. The default is `nan`
            for SDPA's signature, and else `zero`.
        precision: `tf32` allows products of float32 in TF32.
        require: Further properties that must hold: accurate, deterministic, batch-invariant, masked-nan, lse-gradient,
            all.
        seed: Seed of all shapes and values. By default each run draws another one, which `report.seed` names, so that a
            function cannot know them.
        seconds: Time limit in seconds for all cases. The report lists the cases that did not run.
        timeout: Time limit in seconds for one call; by default 60, and 20 with `quick`.
        device: `cpu` or `cuda`; by default `cuda` if torch finds a device.
        only: One case to judge, as in a report (`Failure.case`); or sizes and options to set in all cases.
        save: File for the smallest failing case with its answers, as safetensors.
        progress: Called before each case. An exception that it raises ends the judgement.
        dtypes: The name of `dtype` before 0.3, which still works.

    Returns:
        The report. `report.ok` is the verdict.

    Raises:
        UnusableError: the function cannot be imported or called, or an argument is not valid. It is a ValueError.
    """
    dtypes, require = ((each,) if isinstance(each, str) else tuple(each) for each in (dtype or dtypes, require))
    _check(dtypes, layout, causal_alignment, empty_rows, precision, require)
    seed = secrets.randbits(31) if seed is None else seed
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = Clock(seconds or (QUICK_SECONDS if quick else SECONDS))
    worker = Worker(target_of(function), device or ("cuda" if torch.cuda.is_available() else "cpu"))
    worker.random.seed(seed)
    trial: Trial | None = None
    judgement: _Judgement | None = None
    guard = contextlib.ExitStack()
    guard.enter_context(unreadable())
    try:
        about = worker.start()
        top_left = None if causal_alignment is None else causal_alignment == "top_left"
        signature = signatures.signature_of(about, layout, top_left)
        nan_rows = (empty_rows or ("nan" if signature.style == "sdpa" else "zero")) == "nan"
        trial = Trial(
            worker,
            signature,
            clock,
            precision=precision,
            timeout=timeout or (20.0 if quick else 60.0),
            nan_rows=nan_rows,
        )
        name = function if isinstance(function, str) else f"{about['module']}:{about['name']}"
        chosen = tuple(each for each in dtypes or TYPES if not (trial.interpreted and each == "bfloat16"))
        if not chosen:
            raise UnusableError(f"{_INTERPRETED}: judge float32 and float16, or run it on a GPU")
        judgement = _Judgement(trial, name, chosen, quick, seed, require, progress, layout is None)
        if len(chosen) < len(dtypes or TYPES):
            judgement.skip("bfloat16", _INTERPRETED)
        return judgement.run(only, Path(save) if save is not None else None)
    except NotLoadedError as error:
        raise UnusableError(str(error)) from None
    except EndedError as error:
        raise UnusableError(f"it cannot be imported: {error}") from None
    finally:
        if trial is not None:
            trial.close()
        worker.close()
        guard.close()
        torch.set_num_threads(threads)
        judgement = trial = None  # these hold the answers of all cases
        trim()  # the heaps keep them else: up to 3 GB after a quick judgement


def _check(
    dtypes: Sequence[str],
    layout: str | None,
    alignment: str | None,
    empty: str | None,
    precision: str,
    require: Sequence[str],
) -> None:
    allowed: list[tuple[str, Iterable[str | None], Sequence[str]]] = [
        ("dtype", dtypes, TYPES), ("layout", [layout], LAYOUTS), ("require", require, REQUIREMENTS),
        ("causal_alignment", [alignment], ("top_left", "bottom_right")), ("empty_rows", [empty], ("zero", "nan")),
        ("precision", [precision], ("ieee", "tf32")),
    ]  # fmt: skip
    for name, given, known in allowed:
        for each in given:
            if each is not None and each not in known:
                raise UnusableError(f"{name} must be one of {', '.join(known)}, not {each!r}")


class _Judgement:
    """One judgement while it runs."""

    def __init__(
        self, trial: Trial, name: str, dtypes: tuple[str, ...], quick: bool, seed: int, require: tuple[str, ...],
        progress: Callable[[Progress], None] | None, find_layout: bool,
    ) -> None:  # fmt: skip
        self.trial, self.name, self.dtypes, self.quick, self.seed = trial, name, dtypes, quick, seed
        self.require, self.progress, self.find_layout = require, progress, find_layout
        self.outcomes: list[Outcome] = []
        self.properties: list[Property] = []
        self.not_run: dict[tuple[str, str], int] = {}
        self.race: Race | None = None
        self.done = self.total = 0
        self.tried: set[Case] = set()  # cases that were made from refused ones

    def tell(self, stage: str) -> None:
        if self.progress is not None:
            self.progress(Progress(self.done, max(self.total, self.done), stage))

    def run(self, only: Mapping[str, Any] | None, save: Path | None) -> Report:
        trial = self.trial
        trial.clock.kept = _FOR_THE_CAUSE * trial.clock.seconds
        try:
            if self.find_layout:
                self.recognise()
            listed, relate = self.cases(only)
            self.total = len(listed) + 40 * relate
            if only and only.get("call"):
                self.outcomes.append(trial.run(listed[0], "accuracy", **only["call"]))
            else:
                self.accuracy(listed)
                self.outcomes += list(relations.gains(self.outcomes))
            if relate:
                self.relate()
        except StopError as error:
            self.skip("relations", str(error))
        trial.clock.kept = 0.0
        self.settle()
        self.refusals()
        failed = [o for o in self.outcomes if o.failed]
        named: list[Cause] = []
        smallest = None
        if failed:
            self.tell("the cause")
            named = causes.explain(trial, self.outcomes)
            self.tell("the smallest failing case")
            tells = partial(causes.tells, code=named[0].code) if named and named[0].confirmed else None
            smallest = shrinking.smallest(trial, failed, 2.0 if self.quick else 6.0, tells)
        if save is not None and smallest is not None:
            try:
                shrinking.save(save, smallest)
            except OSError as error:  # an error in writing the file must not lose the report
                warnings.warn(f"{save} cannot be written: {error}", stacklevel=3)
                save = None
        return self.report(named, smallest, save)

    def recognise(self) -> None:
        """Find the layout by trial calls, and record a note about it and a wrong trial call for the report."""
        trial = self.trial
        if trial.signature.packed or trial.signature.ragged or trial.signature.style in ("sdpa", "flashpoint"):
            return
        text, failed = shapes.find_layout(trial, self.dtypes)
        if text:
            self.properties.append(Property("layout", "fails", text))
        if failed is not None:  # a wrong trial call counts as a failure, like any other call
            self.outcomes.append(failed)

    def cases(self, only: Mapping[str, Any] | None) -> tuple[list[Case], bool]:
        """Return the cases to judge, and whether to test relations between calls (see relations.py).

        An example of a relation: a repeated call has the same bits. Relations are tested only without `only`.
        """
        takes = self.trial.signature.options
        ragged = self.trial.signature.ragged
        listed = cases.listed(self.seed, quick=self.quick, takes=takes, ragged=ragged, dtypes=self.dtypes)
        if only is not None and "seed" in only and "values" in only:
            return [Case.from_dict({n: v for n, v in only.items() if n != "call"})], False
        if only:
            fixed = {n: tuple(v) if isinstance(v, list) else v for n, v in only.items()}
            sizes = {"batch": 1, "q_heads": 1, "kv_heads": fixed.get("q_heads", 1)}
            sizes |= {"kv_len": fixed.get("q_len", 64), "value_dim": fixed.get("head_dim", 64)}
            kinds = dict.fromkeys(case.values for case in listed) if {"q_len", "head_dim"} <= fixed.keys() else None
            if kinds is not None:
                listed = [
                    Case.from_dict({"values": kind, "dtype": dtype, **sizes, **fixed})
                    for dtype in self.dtypes for kind in kinds if not kind.endswith("-exact") or fixed["head_dim"] == 16
                ]  # fmt: skip
            else:
                listed = list(dict.fromkeys(Case.from_dict(case.to_dict() | fixed) for case in listed))
        listed = [varied(case, self.seed) if not only else case for case in listed if case.dtype in self.dtypes]
        listed = [reseeded(case, self.seed) for case in dict.fromkeys(map(self.trial.signature.fit, listed))]
        return listed, not only

    def arguments(self) -> list[str]:
        """Return the arguments of the command line that repeat the whole judgement."""
        parts = ["--seed", str(self.seed), *(["--quick"] if self.quick else [])]
        return parts + (["--dtype", self.dtypes[0]] if len(self.dtypes) == 1 else [])

    def skip(self, what: str, reason: str, count: int = 1) -> None:
        self.not_run[what, reason] = self.not_run.get((what, reason), 0) + count

    def accuracy(self, listed: Sequence[Case]) -> None:
        trial = self.trial
        coming = [case for case in listed if trial.signature.refuses(case) is None]
        for case in listed:
            self.done += 1
            if coming and case is coming[0]:
                del coming[0]
                trial.prepare(coming[:AHEAD])
            if (reason := trial.signature.refuses(case)) is not None:
                self.skip(", ".join(sorted(case.options)) or "shape", reason)
                continue
            if not trial.affordable(case):
                self.skip("large cases", "they would have taken too long")
                continue
            self.tell(f"{case.values} values, {case.dtype}")
            outcome = self.answered(case)
            if outcome.status == "refused" and (other := self.projected(case)) is not None:
                self.outcomes.append(outcome)
                outcome = self.answered(other)
            if outcome.ill > 0.1 and case.values != "normal":  # too many ill-posed rows: draw another case
                self.skip(f"{case.values} values", "more than a tenth of the rows are ill-posed")
                continue
            self.outcomes.append(outcome)

    def answered(self, case: Case) -> Outcome:
        """Return the outcome of a case: with fewer gradients, or none, if the function refuses them."""
        trial = self.trial
        outcome = trial.run(case)
        if trial.extra and set(outcome.request["leaves"]) > {"q", "k", "v"} and (
            outcome.status == "refused" or "grad_error" in outcome.facts
        ):  # fmt: skip
            trial.extra = False
            plain = trial.run(case)
            trial.extra = plain.status == outcome.status
            outcome = plain
        if outcome.status == "refused" and outcome.request["leaves"]:
            forward = trial.run(replace(case, forward=True))
            if forward.status != "refused":
                forward.facts["raised"] = outcome.facts["raised"]
                forward.facts["refused_gradient"] = outcome.text
                outcome = forward
        return outcome

    def projected(self, case: Case) -> Case | None:
        """Return a case like one that the function refused, of a shape and type that it accepts; None if there is none.

        The first refusal finds these shapes, by trial calls.
        """
        trial = self.trial
        if trial.shapes is None:
            seen: list[Outcome] = []
            trial.shapes = shapes.find(trial, self.dtypes, seen) or False
            self.outcomes += [each for each in seen if each.status != "refused"]
        if not trial.shapes:
            return None
        other = trial.signature.fit(trial.shapes.project(case))
        known = other == case or other in self.tried or trial.signature.refuses(other) is not None
        self.tried.add(other)
        return None if known or not trial.affordable(other) else other

    def relate(self) -> None:
        trial = self.trial
        chosen = relations.chosen(trial, self.dtypes, self.seed + 1)
        for number, case in enumerate(chosen):
            for outcome in relations.purity(trial, case):
                self.done += 1
                self.tell(f"{outcome.relation}, {case.dtype}")
                self.outcomes.append(outcome)
            if number == 0:
                for found in relations.other_derivatives(trial, case):
                    self.note(found)
                self.properties += [relations.batch_invariant(trial, case), relations.masked_nan(trial, case)]
                property_of_lse, outcome_of_lse = relations.lse_gradient(trial, case)
                self.properties.append(property_of_lse)
                if outcome_of_lse is not None:
                    outcome_of_lse.status, outcome_of_lse.relation = "wrong", "the gradient of lse"
                    self.outcomes.append(outcome_of_lse)
        for found in dropping.dropout(trial, self.dtypes, self.seed):
            self.note(found)
        if chosen:
            self.repeat(chosen)
            for found in relations.compiled(trial, chosen[0]):
                self.note(found)
            trial.worker.stop()  # the compiler leaves threads

    def note(self, found: Outcome | Property) -> None:
        if isinstance(found, Outcome):
            self.outcomes.append(found)
        else:
            self.properties = [p for p in self.properties if p.name != found.name] + [found]

    def repeat(self, chosen: list[Case]) -> None:
        trial = self.trial
        small = chosen[0]
        wide = replace(small, batch=1, q_len=130, kv_len=257, causal="causal" in trial.signature.options)
        wide = replace(wide, q_heads=2, kv_heads=2) if trial.signature.packed != "qkv" else small
        quick = replace(small, forward=True, batch=1, q_len=8, kv_len=24)  # many calls, as inference has them
        fitted = (trial.fitted(case) for case in (small, quick, wide, *chosen[1:]))
        listed = list(dict.fromkeys(case for case in fitted if case is not None))
        calls, forward, gradient = [], False, False
        for repeated in relations.repeats(trial, listed, QUICK_REPEATS if self.quick else REPEATS, self.tell):
            if isinstance(repeated, Outcome):
                self.outcomes.append(repeated)
                continue
            calls.append(repeated[0])
            forward |= repeated[1]
            gradient |= repeated[2]
        total = sum(calls)
        if total > 1:
            self.race = Race(total, 1 - 0.01 ** (1 / total))
        if forward and not any(o.relation == "repeated calls" and o.failed for o in self.outcomes):
            outcome = trial.run(listed[0], "repeated calls")
            outcome.status = "wrong"
            outcome.text = "the bits of the forward differ from call to call"
            self.outcomes.append(outcome)
        what = "the forward" if forward else "gradients"
        text = f"the bits of {what} differ from call to call" if forward or gradient else "equal calls have equal bits"
        standing: Standing = "not tested" if total < 2 else "fails" if forward or gradient else "holds"
        self.properties.append(Property("deterministic", standing, text if total > 1 else "no repeated call ran"))

    def settle(self) -> None:
        """Report a refusal as a failure if the function accepted the same option in another case."""
        trial = self.trial
        for outcome in self.outcomes:
            key = (outcome.case.dtype, outcome.case.shape, outcome.case.options)
            plain, facts = outcome.relation == "accuracy", outcome.facts
            if outcome.status == "refused" and plain and key in trial.accepted:
                outcome.status = "wrong"
                outcome.text += ", though it accepts this shape, type and options with other values"
            if key not in trial.with_gradients or not plain:
                continue
            if "grad_error" in facts or "refused_gradient" in facts:
                outcome.status = "wrong"
            elif (
                outcome.request.get("leaves")
                and outcome.status in ("right", "imprecise")
                and facts.get("grad") is False
            ):
                outcome.status, outcome.text = "wrong", "o has no gradient, though it has one with other values"

    def refusals(self) -> None:
        """Report options that the signature has, but with which every call raised, although the call without them runs.

        These options count as unsupported, not as failures. NotImplementedError always means unsupported.
        """
        for name in sorted(self.trial.signature.options):
            having = [o for o in self.outcomes if o.relation == "accuracy" and name in o.case.options]
            raised = [o for o in having if o.status == "refused"]
            if not raised or len(raised) < len(having):
                continue
            first = min(raised, key=lambda o: (len(o.case.options), o.case.scores))
            if first.facts["raised"]["type"] == "NotImplementedError":
                continue
            with contextlib.suppress(StopError):
                if self.trial.run(first.case.without(name)).status in ("refused", "ended"):
                    continue
                text = first.text.removeprefix("it raised ")[:300]
                text = f"{name}, which the signature names, raised in every case: {text}"
                self.properties.append(Property(f"option {name}", "not tested", text))

    def report(self, named: list[Cause], smallest: Outcome | None, save: Path | None) -> Report:
        trial, clock = self.trial, self.trial.clock
        judged = [o for o in self.outcomes if o.status != "refused"]
        failed = sorted((o for o in judged if o.failed), key=lambda o: (o.relation != "accuracy", o.case.scores))
        imprecise = sorted((o for o in judged if o.status == "imprecise"), key=lambda o: o.case.scores)
        outputs = tuple(n for n in OUTPUTS if any(n in o.excess for o in judged))
        refused: dict[str, tuple[str, int]] = {}
        for o in self.outcomes:
            text = o.facts.get("refused_gradient") or ("" if o.status != "refused" else o.text)
            if text and not o.failed:
                what = shrinking.refused_what(o, self.outcomes)
                first, count = refused.get(what, (text[:300], 0))
                refused[what] = first, count + 1
        if self.trial.signature.ambiguous:
            for text in self.trial.signature.ambiguous:
                self.skip("window", text)
        properties = self.demanded(imprecise, refused)
        lacking = [p for p in properties if p.required and p.standing != "holds"]
        answered = [o for o in judged if o.excess]
        verdict: Verdict = (
            "wrong" if failed else "not judged" if not answered else "imprecise" if imprecise else "right"
        )
        again = shrinking.command(trial, smallest, self.name, self.arguments(), guessed=self.find_layout)
        spent = clock.spent
        return Report(
            function=self.name, signature=trial.signature.style,
            layout="thd" if trial.signature.ragged else trial.signature.layout,
            device=trial.worker.device, verdict=verdict,
            ok=verdict in ("right", "imprecise") and not lacking,
            dtypes=tuple(t for t in TYPES if any(o.case.dtype == t and o.excess for o in judged)), outputs=outputs,
            gradients=any(n.startswith("d") for n in outputs), cases=len(judged), calls=clock.calls, seed=self.seed,
            seconds=round(spent, 3),
            judge_seconds=round(max(0.0, spent - clock.waiting), 3), kernel_seconds=round(clock.kernel, 3),
            versions=_versions(), failures=shrinking.spread(failed),
            imprecise=tuple(o.failure(imprecise=True) for o in imprecise[: shrinking.MOST]),
            causes=tuple(named), properties=tuple(properties),
            refused=tuple(NotJudged(what, reason, n) for what, (reason, n) in refused.items()),
            not_run=tuple(NotJudged(what, reason, n) for (what, reason), n in self.not_run.items()), race=self.race,
            smallest=None if smallest is None else smallest.failure(), command=again,
            failed=len(failed), saved=str(save) if save is not None and smallest is not None else None,
        )  # fmt: skip

    def demanded(self, imprecise: list[Outcome], refused: Mapping[str, tuple[str, int]]) -> list[Property]:
        """Return the tested properties, and as `not tested` the others in `require`; mark those in `require`."""
        properties = list(self.properties)
        worst = max((max(o.strict.values()) for o in imprecise if o.strict), default=0.0)
        text = (
            f"{len(imprecise)} cases are between S and L, by up to {worst:.3g} times S"
            if imprecise
            else "every error is within S"
        )
        properties.append(Property("accurate", "fails" if imprecise else "holds", text))
        text = ", ".join(f"{what} ({n} cases)" for what, (_, n) in refused.items())
        text = f"not every option and data type was accepted: {text}" if refused else "no case was refused"
        properties.append(Property("all", "fails" if refused else "holds", text))
        return [replace(p, required=p.name in self.require) for p in properties] + [
            Property(name, "not tested", "it was not tested", required=True)
            for name in self.require if name not in {p.name for p in properties}
        ]  # fmt: skip


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for name in ("flashpoint", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions | {"date": time.strftime("%Y-%m-%d")}
