"""Find the causes of failures: a violated relation, a known mistake with the same wrong numbers, or a description.

The search begins with causes beyond a single call: crashes, changed inputs, answers of an earlier call, races. Then it
compares the wrong numbers with those of known mistakes (`mutants`). It describes other failures by the cases that fail
and by the positions of wrong elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashpoint_contract.judging import Cause
from flashpoint_kernels.judging import values
from flashpoint_kernels.judging.cases import OUTPUTS, Case
from flashpoint_kernels.judging.naming.matching import FEW, LEFT, WrongNumbers, causes_of, foretold, left_by_factor
from flashpoint_kernels.judging.naming.mutants import Mistake
from flashpoint_kernels.judging.naming.patterns import between, pattern
from flashpoint_kernels.judging.naming.relations import BEYOND, OF_CONTEXT, OF_RELATION
from flashpoint_kernels.judging.process import EndedError
from flashpoint_kernels.judging.trial import Outcome, StopError, Trial

_TRIED = 6  # number of failures that are compared with known mistakes
_SMALL = 300_000  # largest number of scores of a case for which mistakes are computed
_PASSED = 10  # number of right answers in which a mistake must predict no error
_MOST = 4  # largest number of causes in a report
_KEPT = ("replay", "state", "aliasing", "first-call")  # causes in what an earlier call has left


def explain(trial: Trial, outcomes: Sequence[Outcome]) -> list[Cause]:
    """Return the causes of the failed outcomes, first the cause that explains most of them."""
    failed = [o for o in outcomes if o.failed]
    left = list(failed)
    named: list[Cause] = []
    try:
        for cause, explained in _beyond_accuracy(trial, outcomes, failed):
            named.append(replace(cause, explains=len(explained)))
            left = [o for o in left if o not in explained]
        for name, code in (("dattn_mask", "mask-gradient"), ("dsinks", "sinks-gradient")):
            if alone := [o for o in left if o.excess.get(name, 0.0) > 1 and not o.wrong_outputs]:
                text = f"the gradient of {name[1:]} is wrong, and all other answers are right"
                advice = "it is the sum over all that shares an element, without the scale"
                named.append(Cause(code, text, advice, False, len(alone)))
                left = [o for o in left if o not in alone]
        if gains := [o for o in left if o.relation == "gain"]:
            advice = "check roundings and factors that all elements share, such as the scale in 16 bits"
            named.append(Cause("gain", gains[0].text.partition(" over ")[0], advice, False, len(gains)))
            left = [o for o in left if o.relation != "gain"]
        numbers = [o for o in left if o.wrong_outputs and o.status == "wrong"]
        kept = next((n for n, cause in enumerate(named) if cause.code in _KEPT), None)
        if kept is not None and numbers and _right_at_first(trial, numbers):
            named[kept] = replace(named[kept], explains=named[kept].explains + len(numbers))
            left = [o for o in left if o not in numbers]
            numbers = []
        race = next((n for n, cause in enumerate(named) if cause.code == "race"), None)
        if race is not None and numbers and not _wrong_again(trial, numbers):
            named[race] = replace(named[race], explains=named[race].explains + len(numbers))
            left = [o for o in left if o not in numbers]
            numbers = []
        if numbers and _uninitialised(trial, numbers):
            advice = "write all of the output, also the rest of its last tile; zero what is added to"
            text = "memory is returned or read that the function has not written"
            named.append(Cause("uninitialised", text, advice, True, len(numbers)))
            left = [o for o in left if o not in numbers]
        elif numbers and (constant := _constant(numbers, outcomes)) is not None:
            named.append(constant)
            left = [o for o in left if o not in numbers]
        elif numbers:
            for cause, explained in _mistakes(trial, numbers, outcomes):
                named.append(replace(cause, explains=len(explained)))
                left = [o for o in left if o not in explained]
    except StopError:
        pass
    left = [o for o in left if o.status == "wrong"]
    if left and (not named or len(left) > 0.1 * len(failed)):
        named.append(pattern(left, outcomes))
    unique: dict[str, Cause] = {}
    for cause in named:
        unique.setdefault(cause.code, cause)
    return sorted(unique.values(), key=lambda c: (-c.explains, not c.confirmed))[:_MOST]


def _beyond_accuracy(
    trial: Trial, outcomes: Sequence[Outcome], failed: list[Outcome]
) -> Iterator[tuple[Cause, list[Outcome]]]:
    """Yield causes that the numbers of a single call do not show."""

    def having(words: str) -> list[Outcome]:
        return [o for o in failed if words in o.text]

    def cause(code: str, text: str, advice: str, *, confirmed: bool = True) -> Cause:
        return Cause(code, text, advice, confirmed, 0)

    ended = [o for o in failed if o.status == "ended"]
    if ended:
        first = min(ended, key=lambda o: o.case.scores)
        kind = first.facts.get("ended", "memory")
        text = {
            "hang": "the function does not return", "memory": "the function needs too much memory",
            "crash": "the function ends its process", "killed": "the function's process is killed",
        }[kind]  # fmt: skip
        advice = f"run the smallest such case under a debugger: {first.case}"
        yield cause(kind, f"{text}: {first.text}", advice, confirmed=kind != "killed"), ended
    for words, code, advice in (
        ("changes its input", "mutation", "write into new memory, not into the inputs"),
        ("of an earlier call", "aliasing", "return new memory from each call, or copy the buffer that is kept"),
        ("shares memory with", "aliasing", "return new memory from each call"),
        ("overwrites the gradients of the first", "aliasing", "return new memory from each backward"),
        ("changes torch's", "global-state", "leave torch's global settings as they were"),
        ("no gradient reaches", "gradient-missing", "return a gradient for each input that wants one"),
        ("has no gradient, though", "gradient-missing", "do not detach o"),
    ):
        if hit := having(words):
            text = next(part for part in hit[0].text.split("; ") if words in part)
            only = [o for o in hit if not o.wrong_outputs]
            yield cause(code, text, advice), only or hit
    raised = [o for o in failed if o.status == "wrong" and ("raised" in o.text and not o.wrong_outputs)]
    relations = {o.relation.partition(" (")[0] for o in raised}
    if len(relations) == 1 and relations <= OF_RELATION.keys():
        (relation,) = relations
        code, _, advice = OF_RELATION[relation]
        yield cause(code, f"{relation}: {raised[0].text}", advice), raised
    elif raised:
        advice = "support the case, or refuse it everywhere with a clear exception"
        yield cause("exception", raised[0].text, advice), raised
    shaped = [o for o in failed if "has shape" in o.text or "must be" in o.text or "it returned" in o.text]
    if shaped:
        numpy = "ndarray" in shaped[0].text
        advice = "o has q's type and shape, but v's last dimension"
        advice = "return torch.from_numpy(o), or judge a file that flashpoint.save_case writes" if numpy else advice
        yield cause("answer-form", shaped[0].text, advice), shaped
    repeated = [
        o for o in failed if o.relation == "repeated calls" and ("equal" in o.text or "bits of the forward" in o.text)
    ]
    numbers = [o for o in failed if o.wrong_outputs and o.relation == "accuracy"]
    steady, changing = _again(trial, numbers)
    if repeated:
        gradient = all(n.startswith("d") for o in repeated for n in o.wrong_outputs) and any(
            o.wrong_outputs for o in repeated
        )
        what = "gradients differ" if gradient else "answers differ"
        text = f"a race: {what} from call to call with equal inputs ({repeated[0].text})"
        advice = "look for a missing barrier or atomic, and for memory that two programs write"
        code = "race"
        if any(o.facts.get("always") for o in repeated):
            code, text = "state", f"{what} with each call, though inputs are equal: {repeated[0].text}"
            advice = "clear the buffers that gradients are added to; write memory before it is read"
        hit = repeated + [o for o in failed if o.wrong_outputs and o not in repeated and not steady]
        yield cause(code, text, advice), hit
    elif numbers and not steady:
        firsts = _first(outcomes)
        if all(o in firsts for o in numbers):
            text, advice = (
                "the first call is wrong, and the same call later is right",
                "discard what autotuning has left",
            )
            yield cause("first-call", text, advice), numbers
        elif any(_same_as_earlier(o, outcomes) for o in numbers):
            text, advice = "the answer of an earlier call is returned", "do not cache by address or shape"
            yield cause("replay", text, advice), numbers
        else:
            code, text = "state", "the same call is wrong in one place of the order, and right in another"
            if not changing:
                code, text = "race", "a wrong answer was not repeated: a race, or state that is kept between calls"
            advice = "do not keep buffers between calls without clearing them; look for a missing barrier"
            yield cause(code, text, advice), numbers
    elif numbers and any(_same_as_earlier(o, outcomes) for o in numbers):
        yield cause("replay", "the answer of an earlier call is returned", "do not cache by address or shape"), numbers
    # Skip a wrong answer in a test of a relation if plain calls with this data type and `causal` are also wrong.
    inaccurate = {
        (o.case.dtype, o.case.causal, bool(o.request.get("leaves")))
        for o in numbers
        if o.case.values == "normal" and o.case.options <= {"causal"}
    }
    unsteady = any(o.wrong_outputs for o in repeated) or not steady
    beyond = [o for o in failed if o.relation.partition(" (")[0] in BEYOND and o.wrong_outputs]
    if beyond and not unsteady and _reads_beyond(trial, beyond[0]):
        advice = "mask loads beyond the end of rows and of tensors"
        yield cause("out-of-bounds", "memory beyond the end of the inputs is read, and counts", advice), beyond
        failed = [o for o in failed if o not in beyond]
    form_of_do = any(o.relation.startswith("a gradient of o in") and o.wrong_outputs for o in failed)

    def code_of(o: Outcome) -> str:
        """Return the code of an outcome's relation. Where q, k and v have another memory form, do has it, too."""
        code = OF_RELATION.get(o.relation.partition(" (")[0], ("",))[0]
        of_do = code == "strides" and form_of_do and o.request.get("leaves") and "o" not in o.wrong_outputs
        return "gradient-strides" if of_do else code

    alone: dict[tuple[Case, bool], bool] = {}
    for o in [] if unsteady else failed:
        relation = o.relation.partition(" (")[0]
        grads, plain = bool(o.request.get("leaves")), (o.case.dtype, o.case.causal)
        if o.relation == "accuracy" or not o.wrong_outputs or (*plain, True) in inaccurate:
            continue
        if relation != "repeated calls" and (*plain, grads) in inaccurate:
            continue
        key = o.case, grads != (relation == "repeated calls")  # the call with gradients against the one without
        if key not in alone:
            alone[key] = _right_alone(trial, *key)
        if not alone[key]:
            continue
        if relation.startswith("a gradient of ") and relation.endswith("alone"):
            text = f"the gradient is wrong if one input alone wants it: {relation}"
            advice = "return each gradient in its own place, whatever ctx.needs_input_grad says"
            yield cause("needs-input-grad", text, advice), [x for x in failed if x.relation.endswith("alone")]
        if relation == "repeated calls" and not repeated:
            text = f"the answer is wrong {'with' if grads else 'without'} gradients wanted"
            advice = "one function must give the same o with and without autograd"
            alike = [x for x in failed if x.wrong_outputs and bool(x.request.get("leaves")) == grads]
            yield cause("grad-mode", text, advice), alike
        if relation in OF_RELATION:
            own = code_of(o) == OF_RELATION[relation][0]
            code, text, advice = OF_RELATION[relation if own else "a gradient of o in another memory form"]
            alike = [x for x in failed if code_of(x) == code]
            yield cause(code, text, advice), alike
    others = [o for o in failed if o.relation not in ("accuracy", "gain")]
    odd = {o.relation.partition(" (")[0] for o in others}
    usual = [o.case.options for o in numbers if o.case.values in ("normal", "aimed")]
    anyway = any(options <= o.case.options for options in usual for o in others)
    if odd and odd <= OF_CONTEXT.keys() and not unsteady and not anyway and _right_alone(trial, others[0].case, True):
        yield cause(*next(of for each, of in OF_CONTEXT.items() if each in odd)), others


def _right_alone(trial: Trial, case: Case, grads: bool) -> bool:
    """Return whether a new process answers a plain call rightly, so that a wrong one is due to what was changed."""
    try:
        trial.worker.start()
    except EndedError:
        return False
    mode: dict[str, Any] = {} if grads else {"leaves": []}
    return trial.run(case, **mode).status in ("right", "imprecise")


def _reads_beyond(trial: Trial, o: Outcome) -> bool:
    """Return whether a contiguous input at its usual address is read wrongly with NaN behind it, and only then."""
    views = dict.fromkeys(("q", "k", "v", "qkv", "kv"), "ended")
    usual, ended = (trial.run(o.case, "memory behind the inputs", views=each, leaves=[]) for each in ({}, views))
    return usual.status in ("right", "imprecise") and ended.status == "wrong"


def _constant(numbers: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Cause | None:
    """Return the cause if all wrong outputs have the same constant value, and no answer on normal values is right."""
    grads = all("o" not in o.wrong_outputs for o in numbers)
    plain = [o for o in outcomes if o.case.values == "normal" and o.case.scores > 1 and o.relation == "accuracy"]
    if any(o.status in ("right", "imprecise") for o in plain if not grads or "dq" in o.excess):
        return None
    names = sorted({n for o in numbers for n in o.wrong_outputs}, key=list(OUTPUTS).index)
    firsts = set()
    for o in numbers:
        for t in (o.answers[n].double() for n in o.wrong_outputs if o.answers[n].numel() > 1):
            firsts.add(str(float(t.flatten()[0]) + 0.0))  # -0.0 is 0, too
            if not bool(t.isnan().all() or (t == t.flatten()[0]).all()):
                return None
    if len(firsts) != 1 or ("o" in names and any("o" not in o.wrong_outputs for o in numbers)):
        return None
    are = "are" if len(names) > 1 else "is"
    advice = "check that the kernel is launched, and that it writes the tensor that is returned"
    return Cause("constant", f"{', '.join(names)} {are} {firsts.pop()} everywhere", advice, True, len(numbers))


def _uninitialised(trial: Trial, numbers: Sequence[Outcome]) -> bool:
    """Return whether the wrong elements are NaN, as they were not, if memory from torch.empty is filled with NaN."""
    shown = 0
    for o in sorted(numbers, key=lambda o: o.case.scores)[:3]:
        filled = trial.run(o.case, "memory that is not initialised", poison=True)
        for name in ("o",) if "o" in o.wrong_outputs else o.wrong_outputs:
            wrong = o.limits[name].excess(o.answers[name], o.dtype_of(name))[1] > 1
            if name not in filled.answers or filled.answers[name].shape != wrong.shape:
                return False
            lost = filled.answers[name].isnan() & ~o.answers[name].isnan()
            if float(lost[wrong].double().mean()) < 0.95:
                return False
            shown += 1
    return shown > 0


def _first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the first outcome, and the first of each data type and shape."""
    seen: dict[object, Outcome] = {}
    for o in outcomes:
        seen.setdefault((o.case.dtype, o.case.shape), o)
    return [*outcomes[:1], *seen.values()]


def _again(trial: Trial, numbers: Sequence[Outcome]) -> tuple[bool, bool]:
    """Return whether a repeated call is wrong again, and whether the error depends on earlier calls.

    Repeat the smallest failing calls in the function's present process, and the smallest one in a new process.
    """
    if not numbers:
        return True, False
    chosen = sorted(numbers, key=lambda o: o.case.scores)[:3]
    steady = sum(trial.run(o.case).status == "wrong" for o in chosen)
    if steady == len(chosen):
        try:
            trial.worker.start()
        except EndedError:
            return True, False
        if trial.run(chosen[0].case).status != "wrong":
            return False, True
    return steady > 0, 0 < steady < len(chosen)


def _wrong_again(trial: Trial, numbers: Sequence[Outcome]) -> bool:
    """Return whether one of the smallest wrong answers is wrong in each of three more calls."""
    chosen = sorted(numbers, key=lambda o: o.case.scores)[:4]
    return any(all(trial.run(o.case).status == "wrong" for _ in range(3)) for o in chosen)


def _right_at_first(trial: Trial, numbers: Sequence[Outcome]) -> bool:
    """Return whether wrong answers of all sizes are right in a new process, so that earlier calls made them wrong."""
    by_size = sorted(numbers, key=lambda o: o.case.scores)
    chosen = {0: by_size[0], len(by_size) // 2: by_size[len(by_size) // 2], len(by_size) - 1: by_size[-1]}
    return all(_right_alone(trial, o.case, bool(o.request.get("leaves"))) for o in chosen.values())


def _same_as_earlier(o: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Return whether the answer equals that of an earlier call with other inputs."""
    if "o" not in o.answers or bool((o.answers["o"] == o.answers["o"].flatten()[:1]).all()):
        return False
    for other in outcomes:
        if other is o:
            return False
        other_o = other.answers.get("o")
        if (
            other_o is not None
            and other_o.shape == o.answers["o"].shape
            and other.case.seed != o.case.seed
            and torch.equal(other_o, o.answers["o"])
        ):
            return True
    return False


def _mistakes(
    trial: Trial, numbers: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> Iterator[tuple[Cause, list[Outcome]]]:
    """Yield known mistakes that give the wrong numbers, until each tested failure has an explanation."""
    chosen = _representative(numbers)
    simple = sorted((o for o in chosen if not trial.signature.ragged), key=lambda o: "o" not in o.wrong_outputs)
    texts: dict[tuple[str, str], tuple[Mistake, list[Outcome]]] = {}
    for o in simple:
        earlier = [mistake for mistake, _ in texts.values() if mistake.forward or mistake.backward]
        for mistake in causes_of(_numbers(o), earlier):
            texts.setdefault((mistake.code, mistake.text), (mistake, []))[1].append(o)
    _join_factors(texts, simple)
    left = list(simple)
    while left and texts:
        key = max(texts, key=lambda each: len([o for o in texts[each][1] if o in left]))
        mistake, explained = texts.pop(key)
        now = [o for o in explained if o in left]
        if not now:
            return
        if (told := _confirmed(trial, mistake, explained, outcomes)) is None:
            continue
        confirmed, where = told
        if mistake.backward and any("o" in o.wrong_outputs for o in numbers):
            confirmed = False  # gradients that a wrong forward leaves can look like it
        like = [o for o in numbers if o in now or (o not in simple and any(_alike(o, x) for x in now))]
        text = f"{mistake.text}, where {where}" if where else mistake.text
        yield Cause(mistake.code, text, mistake.advice, confirmed, 0), like
        left = [o for o in left if o not in now]


def _confirmed(
    trial: Trial, mistake: Mistake, explained: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> tuple[bool, str] | None:
    """Return whether a mistake is confirmed, and in words where it occurs; "" if wherever it can.

    It is confirmed if it gives the wrong elements, and no others, with several kinds of values. Return None if it is
    refuted: it predicts other elements in all cases, or an error where the function is right, and nothing that is known
    of a call tells these calls from the failing ones.
    """
    kinds = {o.case.values for o in explained}
    first = min(explained, key=lambda o: o.case.scores)
    more = [replace(first.case, values=each) for each in ("normal", "sharp", "high") if each not in kinds]
    more += [replace(first.case, seed=first.case.seed + 1)]
    if mistake.code == "scale" or not (mistake.forward or mistake.backward):  # it was read from the numbers
        again = [o for o in map(trial.run, more) if o.status == "wrong" and o.wrong_outputs]
        codes = [[each.code for each in causes_of(_numbers(o))] for o in again]
        kinds |= {o.case.values for o in again}
        return None if any(mistake.code not in each for each in codes) else (bool(again) and len(kinds) > 1, "")
    options = {o.case.options for o in explained}  # with others, a kernel may take another path
    passed = [
        o for o in outcomes
        if o.relation == "accuracy" and o.status in ("right", "imprecise") and o.answers and o.case.scores <= _SMALL
        and o.case.kv_len > FEW and o.case.dtype == first.case.dtype and o.case.options in options
    ]  # fmt: skip
    passed.sort(key=lambda o: -o.case.scores)
    spread = list({(o.case.options, o.case.values, o.case.group): o for o in passed}.values())[-_PASSED:]
    tested: list[tuple[Case, str | None]] = []

    def test(calls: Iterable[Outcome]) -> None:
        tested.extend((o.case, foretold(_numbers(o), mistake) if o.answers else None) for o in calls)

    def having(found: str) -> list[Case]:
        return [case for case, told in tested if told == found]

    test([*explained, *map(trial.run, more), *spread])
    where, enough = "", len(having("wrong")) > 1
    if having("refuted") and having("wrong"):  # which of the differences matters: change the sizes, and all others
        plain = replace(first.case, batch=1, q_heads=2, kv_heads=2, head_dim=64, value_dim=64)
        plain = replace(plain, bare=not plain.bare, forward=not plain.forward)
        test(trial.run(case) for case in (plain, replace(first.case, q_len=33, kv_len=77)))
        where, enough = between(having("wrong"), having("refuted")), len(explained) > 1
        if len(having("wrong")) < 3:
            return None
    if not having("wrong") or (having("refuted") and not where):
        return None
    kinds = {case.values for case, told in tested if told in ("wrong", "right")}
    return enough and len(kinds) > 1, where


def _join_factors(texts: dict[tuple[str, str], tuple[Mistake, list[Outcome]]], simple: Sequence[Outcome]) -> None:
    """Merge the causes "scores are F times the right ones" with different F into one, for all cases that an F explains.

    If almost all weight is on one key, several factors and other mistakes give the same numbers.
    """
    fitted = [key for key, (mistake, _) in texts.items() if key[0] == "scale" and "sqrt" not in mistake.text]
    if not fitted:
        return
    fitted_scales = [texts.pop(key) for key in fitted]
    factors = sorted({float(mistake.text.split()[2]) for mistake, _ in fitted_scales})
    scales = [o for key, (_, named) in texts.items() if key[0].startswith(("scale", "base-2")) for o in named]
    members = [o for _, explained in fitted_scales for o in explained]
    for o in simple:
        if o not in members and (o in scales or any(left_by_factor(_numbers(o), factor) < LEFT for factor in factors)):
            members.append(o)
    mistake = fitted_scales[0][0]
    if len(factors) > 1:
        text = f"scores are {factors[0]:g} to {factors[-1]:g} times the right ones, which differs from case to case"
        mistake = replace(mistake, text=text)
    texts["scale", mistake.text] = mistake, members


def tells(o: Outcome, code: str) -> int:
    """Return how clearly an outcome shows a cause, as 0, 1 or 2.

    0: it is not the first cause that reproduces the wrong numbers. 2: no other cause does, apart from low precision.
    """
    if o.call.signature.ragged or o.case.scores > _SMALL or not o.wrong_outputs:
        return 0
    codes = [mistake.code for mistake in causes_of(_numbers(o))]
    alone = all(each == code or each.startswith("low-precision") for each in codes)
    return 0 if codes[:1] != [code] else 2 if alone else 1


def _numbers(o: Outcome) -> WrongNumbers:
    top_left = o.call.problem.spec.options.causal_alignment == "top_left"
    return WrongNumbers(o.case, values.draw(o.case), top_left, o.answers, o.limits, o.wrong_outputs)


def _alike(o: Outcome, other: Outcome) -> bool:
    return (
        o.case.options == other.case.options
        or o.case.values == other.case.values
        or set(o.wrong_outputs) == set(other.wrong_outputs)
    )


def _representative(numbers: Sequence[Outcome]) -> list[Outcome]:
    """Return failures with different options, values and outputs: the smallest, and those with the largest errors."""
    kept: dict[object, Outcome] = {}
    plain = [o for o in numbers if o.relation == "accuracy"] or list(numbers)
    plain = [o for o in plain if o.case.kv_len > FEW] or plain
    for o in sorted(plain, key=lambda o: (o.case.dtype != "float32", o.case.scores)):
        if o.case.scores <= _SMALL or not kept:
            kept.setdefault((o.case.options, o.case.window, o.case.values, "o" in o.wrong_outputs), o)
    chosen = list(kept.values())
    chosen.sort(key=lambda o: (len(o.case.options) + (o.case.values != "normal"), o.case.dtype != "float32"))
    return chosen[:_TRIED]
