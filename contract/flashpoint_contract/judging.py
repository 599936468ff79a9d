"""The report of the judge, and its JSON schema: which cases were judged, what is wrong, why, and how to repeat it."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from flashpoint_contract import strictjson

Verdict = Literal["right", "imprecise", "wrong", "not judged"]
Standing = Literal["holds", "fails", "not tested"]
# Orders of axes that a function may expect, in the order in which the judge tries them. A missing letter is an
# axis of size 1 that the function does not have.
LAYOUTS = ("bhsd", "bshd", "sbhd", "shd", "hsd", "bsd", "sd")
REQUIREMENTS = ("accurate", "deterministic", "batch-invariant", "masked-nan", "lse-gradient", "all")


@dataclass(frozen=True)
class Cause:
    """A reason for failures.

    - `code`: a short fixed name, such as `missing-rescale`; `unknown` if no known mistake explains the failures.
    - `text`: what is wrong, in a sentence. `advice`: what to do.
    - `confirmed`: attention with this mistake, made on purpose, gives the function's wrong numbers.
    - `explains`: the number of failures that it explains.
    """

    code: str
    text: str
    advice: str
    confirmed: bool
    explains: int


@dataclass(frozen=True)
class Failure:
    """One case or relation that failed.

    - `relation`: `accuracy`, or the property that does not hold, such as `inputs unchanged`.
    - `case`: the fields of the case; `problem`: the same as text.
    - `output`: the answer with the largest error: o, lse, dq, dk or dv; None if there is none.
    - `error`: the error at `index`. It is wrong above its bound L, `allowed`, and imprecise above its bound S,
      `accurate`. `excess`: the largest error/L.
    - `elements`: the number of wrong elements, out of `of`. `where`: their rows, heads or keys.
    """

    relation: str
    problem: str
    case: dict[str, Any]
    text: str
    output: str | None = None
    error: float | None = None
    accurate: float | None = None
    allowed: float | None = None
    excess: float | None = None
    index: tuple[int, ...] | None = None
    value: float | None = None
    expected: float | None = None
    elements: int = 0
    of: int = 0
    where: str = ""


@dataclass(frozen=True)
class Property:
    """A property that is reported, and fails only if `required`, such as `batch-invariant`."""

    name: str
    standing: Standing
    text: str
    required: bool = False


@dataclass(frozen=True)
class NotJudged:
    """A part that was not judged, and the reason: the function refused it, or there was no time."""

    what: str
    reason: str
    cases: int


@dataclass(frozen=True)
class Race:
    """Repeated calls to find a race. If a fraction `excluded` were wrong, `calls` show it with 99% probability."""

    calls: int
    excluded: float


@dataclass(frozen=True)
class Report:
    """The result of the judge.

    - `verdict`: `right`; `imprecise`: some errors are above S, none above L; `wrong`; or `not judged`.
    - `ok`: nothing that is required fails.
    - `outputs`: answers that were judged. `gradients`: whether gradients were.
    - `cases`: cases that were judged, and relations of them; `failed`: those that failed, of which `failures` has some;
      a failing case can have several causes. `calls`: all calls, including repeated ones.
    - `refused`: cases that the function refused by a clear exception. `not_run`: cases without time.
    - `smallest`: the smallest failing case that was found. `command` repeats it.
    - `judge_seconds`: the judge's own work; `kernel_seconds`: time inside the function.
    """

    function: str
    signature: str
    layout: str
    device: str
    verdict: Verdict
    ok: bool
    dtypes: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: bool
    cases: int
    calls: int
    seed: int
    seconds: float
    judge_seconds: float
    kernel_seconds: float
    versions: dict[str, str]
    failures: tuple[Failure, ...] = ()
    imprecise: tuple[Failure, ...] = ()
    causes: tuple[Cause, ...] = ()
    properties: tuple[Property, ...] = ()
    refused: tuple[NotJudged, ...] = ()
    not_run: tuple[NotJudged, ...] = ()
    race: Race | None = None
    smallest: Failure | None = None
    command: str | None = None
    saved: str | None = None
    failed: int = 0
    version: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings. Numbers that JSON does not have are strings such as `NaN`."""
        document: dict[str, Any] = _plain(dataclasses.asdict(self))
        return document

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report as text: verdict, cause, smallest failing case, the rest, and once more the verdict."""
        verdict = f"{'PASS' if self.ok else 'FAIL'}: {self._conclusion()}"
        lines = [verdict, *map(self._cause, self.causes[:1])]
        if self.smallest is not None:
            lines += _failure_lines(self.smallest, "smallest failing case")
        for number, cause in enumerate(self.causes):
            lines += [self._cause(cause)] if number else []
            lines.append(f"  hint: {cause.advice}")
        if sum(cause.explains for cause in self.causes) > self.failed:
            lines.append("a failing case can have several causes")
        lines.append(
            f"{self.function} · {self.layout} · {self.device} · {self.cases} cases judged · "
            f"{self.seconds:.1f} s, {self.kernel_seconds:.1f} s of them in the function"
        )
        judged = f"judged: {', '.join(self.outputs)} in {', '.join(self.dtypes)}; drawn from --seed {self.seed}"
        lines.append(judged if self.outputs else "nothing was judged")
        if self.outputs and not self.gradients:
            lines[-1] += "; forward only: autograd finds no gradient on o"
            lines.append("hint: call your backward from a torch.autograd.Function")
        shown = {self.smallest.relation} if self.smallest is not None else set()
        for failure in self.failures:
            if failure.relation not in shown:
                lines += _failure_lines(failure, failure.relation)
                shown.add(failure.relation)
        if self.imprecise and not self.failures:
            worst = max(self.imprecise, key=lambda f: (f.error or 0) / (f.accurate or 1))
            lines.append(
                f"imprecise: {len(self.imprecise)} cases have larger errors than scores in float32 explain "
                f"(--require accurate fails them); such as {worst.problem}: {worst.text}"
            )
        for each in self.properties:
            if each.required and each.standing == "holds":
                lines.append(f"{each.name}: {each.standing}, required: {each.text}")
            elif each.standing == "fails" and each.name not in ("accurate", "all", "layout"):  # they have other lines
                advice = f" (--require {each.name} fails it)" if each.name in REQUIREMENTS else ""
                lines.append(f"reported, no failure: {each.text}{advice}")
        for part in self.refused:
            lines.append(f"unsupported: {part.what} ({part.cases} cases): {part.reason}")
        for part in self.not_run:
            lines.append(f"not run: {part.what} ({part.cases} cases): {part.reason}")
        if self.race is not None:
            raced = any(failure.relation == "repeated calls" for failure in self.failures)
            lines.append(
                f"{'' if raced else 'no race in '}{self.race.calls} repeated calls; "
                f"a race in {self.race.excluded:.2%} of calls or more would have shown (99%)"
            )
        if self.saved is not None:
            lines.append(f"saved: {self.saved}, which flashpoint verify and POST /verify take")
        if self.command is not None:
            lines.append(f"repeat it: {self.command}")
        if self.smallest is not None and self.saved is None:
            lines.append("its inputs and answers: add --save case.safetensors")
        if self.ok:
            lines.append(
                f"not excluded: a function that counts more than {self.calls} calls, reads the clock for more than "
                f"{self.seconds:.0f} s, or looks into /proc, its limits or its sockets; this is no sandbox"
            )
        return [*lines, verdict]

    def _cause(self, cause: Cause) -> str:
        how = "confirmed" if cause.confirmed else "probable"
        return f"cause: {cause.text} [{cause.code}, {how}, {cause.explains} of {self.failed} failing cases]"

    def _conclusion(self) -> str:
        """Return the verdict as text, with the required properties that do not hold, and the properties `layout` and
        `option …`, if reported.
        """
        text = {
            "right": "every error is within its bound", "imprecise": "no error is above L, some are above S",
            "not judged": "no case could be judged",
        }.get(self.verdict, f"{self.failed} of {self.cases} cases fail")  # fmt: skip
        lacking = [each for each in self.properties if each.required and each.standing != "holds"]
        if self.verdict in ("wrong", "not judged") or not lacking:
            text = f"{self.verdict}: {text}"
        text += f", but {'; '.join(f'{each.text} (--require {each.name})' for each in lacking)}" if lacking else ""
        last = [each.text for each in self.properties if each.name == "layout" or each.name.startswith("option ")]
        return "; ".join([text, *last])


def _failure_lines(failure: Failure, title: str) -> list[str]:
    lines = [f"{title}: {failure.problem}", f"  {failure.text}"]
    return lines + ([f"  wrong: {failure.where}"] if failure.where else [])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return strictjson.written(value) if isinstance(value, float) else value


def schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of `Report.to_dict`."""
    classes = (Report, Failure, Cause, Property, NotJudged, Race)
    definitions = {each.__name__: _object(each) for each in classes}
    root = definitions.pop("Report")
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Report of the judge"}
    return about | root | {"$defs": definitions}


def _object(of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(of)
    fields = {each.name: _type(hints[each.name]) for each in dataclasses.fields(of)}
    text = " ".join((of.__doc__ or "").split())
    return {
        "type": "object", "description": text, "properties": fields, "required": list(fields),
        "additionalProperties": False,
    }  # fmt: skip


def _type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(each) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        more = {} if arguments[1] is Any else {"additionalProperties": _type(arguments[1])}
        return {"type": "object", **more}
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}  # type: ignore[union-attr]
    if hint is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(strictjson.WORDS)}]}
    return {"type": {str: "string", int: "integer", bool: "boolean", type(None): "null"}[hint]}
