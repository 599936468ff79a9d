"""Choose what a report shows: a small failing case, which is also written to a file, failures, and refusals."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flashpoint_contract import wire
from flashpoint_contract.judging import Failure
from flashpoint_contract.options import OPTIONS
from flashpoint_kernels.judging.cases import OUTPUTS, Case
from flashpoint_kernels.judging.process import EndedError
from flashpoint_kernels.judging.trial import Outcome, StopError, Trial
from flashpoint_kernels.problems.problem import DTYPE_NAMES

MOST = 40  # largest number of failures, and of imprecise cases, in a report, which lists the smallest cases
_LENGTHS = (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024, 1025, 4096, 4097)


def smallest(
    trial: Trial, failed: Sequence[Outcome], seconds: float, tells: Callable[[Outcome], int] | None = None
) -> Outcome:
    """Return the smallest failing call that is found within `seconds`.

    `tells` returns how clearly a call shows the reported cause: 0, 1 or 2 (see `causes.tells`). A smaller call must
    have at least the same number.
    """
    accuracy = [o for o in failed if o.relation == "accuracy" and o.status == "wrong"]
    start = time.monotonic()
    if not accuracy:
        return min(failed, key=lambda o: o.case.scores)
    ordered = sorted(accuracy, key=lambda o: (len(o.case.options), o.case.scores))
    best, clearest = ordered[0], 0
    for o in ordered:
        if tells is None or time.monotonic() - start > seconds / 2 or clearest == 2:
            break
        if (told := tells(o)) > clearest:
            best, clearest = o, told
    tried = {best.case}
    again = True
    try:
        while again:
            again = False
            for case in _smaller(best.case):
                if time.monotonic() - start > seconds:
                    return best
                if case in tried or trial.signature.refuses(case) is not None:
                    continue
                tried.add(case)
                outcome = trial.run(case)
                same = set(outcome.wrong_outputs) & set(best.wrong_outputs) or (
                    not best.wrong_outputs and outcome.failed
                )
                if outcome.status == "wrong" and same and (tells is None or not clearest or tells(outcome) >= clearest):
                    best, again = outcome, True
                    break
    except StopError:
        pass
    return best


def _smaller(case: Case) -> Iterator[Case]:
    """Yield smaller cases, each reduced in one dimension or option, the largest reductions first."""
    if case.batch > 1:
        yield replace(case, batch=1)
    if case.q_heads > 1:
        if case.group > 1:
            yield replace(case, q_heads=case.group, kv_heads=1)
            yield replace(case, q_heads=case.kv_heads)
            if case.group > 2:
                yield replace(case, q_heads=2 * case.kv_heads)
        yield replace(case, q_heads=1, kv_heads=1)
    for name in ("q_len", "kv_len"):
        for length in _LENGTHS:
            if length < getattr(case, name):
                yield replace(case, q_len=length) if name == "q_len" else replace(case, kv_len=length)
    if case.head_dim == case.value_dim:
        for dim in (16, 32, 40, 64, 80):
            if dim < case.head_dim:
                yield replace(case, head_dim=dim, value_dim=dim)
    if case.values != "normal":
        yield replace(case, values="normal")
    if case.causal:
        yield replace(case, causal=False)
    if case.window != (-1, -1):
        yield replace(case, window=(-1, -1))
    if case.dtype != "float32":
        yield replace(case, dtype="float32")


def save(path: Path, outcome: Outcome) -> None:
    """Write the inputs, the options and the function's answers of one call, in layout bhsd (thd with cu_seqlens)."""
    problem = outcome.call.problem
    tensors = {n: t for n, t in problem.tensors.items() if n not in ("o", "lse")}
    answers = {n: outcome.answers[n] for n in OUTPUTS if n in outcome.answers}
    if "lse" in answers:
        answers["lse"] = answers["lse"].float()
    if not any(n.startswith("d") for n in answers):
        tensors.pop("do", None)
    saved = {n: t.detach().cpu().contiguous() for n, t in (tensors | answers).items()}
    names = ("layout", "causal", "causal_alignment", "window", "scale", "softcap", "precision")
    options = {n: getattr(problem.spec.options, n) for n in names}
    given = {
        n: list(v) if isinstance(v, tuple) else v
        for n, v in options.items()
        if v != OPTIONS[n].default or n == "causal"
    }
    head = wire.build_head(
        [(n, DTYPE_NAMES[t.dtype], list(t.shape)) for n, t in saved.items()], wire.encode_options(given)
    )
    with path.open("wb") as file:
        file.write(head)
        for t in saved.values():
            file.write(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b"")


def refused_what(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return the option, type or gradient that the function seems to refuse in a case."""
    case = outcome.case
    if outcome.facts.get("refused_gradient"):
        return "gradients"
    if outcome.relation != "accuracy":
        return outcome.relation
    accepted = [o.case for o in outcomes if o.status in ("right", "imprecise", "wrong") and o.excess]
    checks: list[tuple[str, Callable[[Case], object]]] = [
        (case.dtype, lambda c: c.dtype == case.dtype),
        (f"head dimension {case.head_dim}", lambda c: c.head_dim == case.head_dim),
        ("Dv different from D", lambda c: c.value_dim != c.head_dim or case.value_dim == case.head_dim),
        ("grouped heads", lambda c: c.group > 1 or case.group == 1),
        *((name, lambda c, name=name: name in c.options) for name in sorted(case.options)),
        ("fewer keys than queries", lambda c: c.kv_len < c.q_len or case.kv_len >= case.q_len),
        ("other lengths of keys and queries", lambda c: c.kv_len != c.q_len or case.kv_len == case.q_len),
    ]
    for text, has in checks:
        if not any(has(each) for each in accepted):
            return text
    return "some shapes"


def spread(failed: Sequence[Outcome]) -> tuple[Failure, ...]:
    """Return the first failures: at most MOST, and at most 3 for each relation between calls (see relations.py).

    Omit wrong numbers in a test of a relation if plain calls with the same data type and `causal` have them, too.
    """
    kept: list[Outcome] = []
    counts: dict[str, int] = {}
    plain = {
        (o.case.dtype, o.case.causal, name)
        for o in failed if o.relation == "accuracy" and o.case.values == "normal" and o.case.options <= {"causal"}
        for name in o.wrong_outputs
    }  # fmt: skip
    for outcome in failed:
        alike = {(outcome.case.dtype, outcome.case.causal, name) for name in outcome.wrong_outputs}
        if outcome.relation != "accuracy" and not outcome.text and alike and alike <= plain:
            continue
        counts[outcome.relation] = counts.get(outcome.relation, 0) + 1
        if counts[outcome.relation] <= (MOST if outcome.relation == "accuracy" else 3):
            kept.append(outcome)
    return tuple(o.failure() for o in kept[:MOST])


def command(trial: Trial, smallest: Outcome | None, name: str, whole: list[str], *, guessed: bool) -> str | None:
    """Return the command that repeats a failure: its call, if that fails in a new process, or else all, with `whole`.

    `guessed`: the layout was found by trial.
    """
    if smallest is None or ":" not in name or "<" in name:
        return None
    parts = [*(["TRITON_INTERPRET=1"] if trial.interpreted else []), "flashpoint", "verify", "--kernel", name]
    if _alone(trial, smallest):
        fields = {n: v for n, v in smallest.fields.items() if n != "layout"}
        parts += ["--case", json.dumps(fields, separators=(",", ":"))]
    else:
        parts += whole
    if not trial.signature.ragged and guessed:
        parts += ["--layout", trial.signature.layout]
    if trial.precision != "ieee":
        parts += ["--precision", trial.precision]
    return shlex.join(parts)


def _alone(trial: Trial, smallest: Outcome) -> bool:
    """Return whether a call fails as the first one of a new process."""
    if smallest.status == "ended" or smallest.mode is None:
        return smallest.status == "ended"
    with contextlib.suppress(StopError, EndedError):
        trial.worker.start()
        return trial.run(smallest.case, **smallest.mode).failed
    return False
