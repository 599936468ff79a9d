"""Make one call of a function in its process, and compare its answers with their bounds."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.judging import Failure
from flashpoint_kernels.judging import values
from flashpoint_kernels.judging.cases import ANSWERS, OUTPUTS, Case
from flashpoint_kernels.judging.exact import bounds, places
from flashpoint_kernels.judging.exact.bounds import Limits
from flashpoint_kernels.judging.process import EndedError, Worker
from flashpoint_kernels.judging.signatures import Call, Signature, UnusableError, call_of, from_bhsd

CACHE_BYTES = 192 << 20  # bytes of exact answers that are kept for the judgement of the next function
_BUGS = {
    "ZeroDivisionError",
    "UnboundLocalError",
    "RecursionError",
    "SystemExit",
    "KeyboardInterrupt",
    "AssertionError",
}
_EXTRA = ("attn_mask", "sinks")  # inputs whose gradients a function need not have
_SECOND = ("ddq", "ddk", "ddv")  # upstream gradients of a second derivative
_OF_CALL = ("error", "grad_error", "bad", "unused", "grad", "lse_grad")  # facts of each call, not of all
_CUDA = ("CUDA error", "illegal memory access", "device-side assert", "misaligned address")
_MANY = 0.1  # fraction of the calls that run with several threads of torch
Exact = tuple[dict[str, Limits], Tensor]  # the limits of each answer, and which rows are ill-posed


@dataclass(eq=False)
class Outcome:
    """The result of one call.

    - `status`: `right`, `imprecise`, `wrong`, `refused` (a clear exception), or `ended` (a crash, a hang, no memory).
    - `relation`: `accuracy`, or the property that the call tested.
    - `excess`: the largest error/L of each answer; `strict`: the largest error/S. For S and L see `Limits`.
    """

    case: Case
    call: Call
    relation: str = "accuracy"
    status: str = "right"
    text: str = ""
    answers: dict[str, Tensor] = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)
    strict: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    ill: float = 0.0  # fraction of rows that are ill-posed
    ill_rows: Tensor | None = None
    request: dict[str, Any] = field(default_factory=dict)
    mode: dict[str, Any] | None = field(default_factory=dict)  # entries of the request beyond the case's; None: tensors

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "ended")

    @property
    def wrong_outputs(self) -> tuple[str, ...]:
        return tuple(n for n in OUTPUTS if self.excess.get(n, 0.0) > 1)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the case as a dict, with the entries of the request that differ from its usual ones as `call`."""
        return self.case.to_dict() | ({"call": self.mode} if self.mode else {})

    def failure(self, *, imprecise: bool = False) -> Failure:
        """Return this outcome for the report."""
        ratios = self.strict if imprecise else self.excess
        about: dict[str, Any] = {"relation": self.relation, "problem": str(self.case), "case": self.fields}
        bad = [n for n in ANSWERS if ratios.get(n, 0.0) > 1]
        if not bad:
            return Failure(**about, text=self.text)
        name = bad[0] if "o" in bad else max(bad, key=lambda n: ratios[n])
        limits, answer = self.limits[name], self.answers[name].double()
        ratio = limits.excess(self.answers[name], self.dtype_of(name))[0 if imprecise else 1]
        at = tuple(int(i) for i in (ratio == ratio.max()).nonzero()[0])
        value, expected = float(answer[at]), float(limits.value[at])
        error = abs(value - expected) if math.isfinite(value - expected) else math.inf
        allowed, accurate = float(limits.allowed[at]), float(limits.accurate[at])
        wrong = ratio > 1
        ragged = self.call.signature.ragged
        where = places.where(wrong, name) if not ragged else ""
        limit = f"a right kernel is within {accurate:.1e}" if imprecise else f"allowed is {allowed:.1e}"
        text = f"{name} is off by {error:.1e} at {places.index(at, name, ragged)}: {value:.6g}, "
        text += f"float64 has {expected:.6g}; {limit}"
        if self.text:
            text = f"{self.text}; {text}"
        return Failure(
            **about, text=text, output=name, error=error, accurate=accurate, allowed=allowed,
            excess=self.excess.get(name, 0.0), index=at, value=value, expected=expected, elements=int(wrong.sum()),
            of=wrong.numel(), where=where,
        )  # fmt: skip

    def dtype_of(self, name: str) -> str:
        return "float32" if name in ("lse", "dsinks") else self.case.dtype


class StopError(Exception):
    """The time limit is reached, or the function's process has ended too often."""


@dataclass(eq=False)
class Clock:
    """The time limit of a judgement, and the time spent on each kind of work."""

    seconds: float  # time limit, including the function's own time
    started: float = field(default_factory=time.monotonic)
    kernel: float = 0.0
    waiting: float = 0.0
    calls: int = 0
    kept: float = 0.0  # seconds that `left` does not have, for work that comes later

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.spent - self.kept


class Trial:
    """A function that is judged: its process, its signature, and the cases that it accepted."""

    def __init__(
        self, worker: Worker, signature: Signature, clock: Clock, *, precision: str, timeout: float, nan_rows: bool
    ) -> None:
        self.worker, self.signature, self.clock = worker, signature, clock
        self.precision, self.timeout, self.nan_rows = precision, timeout, nan_rows
        self.ended = 0
        self.forward_only = False
        self.interpreted = bool(worker.about.get("interpreted"))  # by Triton's interpreter
        self.extra = True  # gradients of masks and sinks are requested
        self.shapes: Any = None  # the `Shapes` that the function accepts, once a case was refused
        self.timed: list[tuple[int, int, float]] = []  # (number of scores, of programs, seconds) of each call
        self.ahead: dict[Case, Future[tuple[Call, Exact]]] = {}
        self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.accepted: set[Any] = set()
        self.with_gradients: set[Any] = set()

    def fitted(self, case: Case) -> Case | None:
        """Return a case like `case` that the function accepts, as far as is known; None if there is none."""
        case = self.signature.fit(self.shapes.project(case) if self.shapes else case)
        return None if self.signature.refuses(case) is not None else case

    def prepare(self, cases: Iterable[Case]) -> None:
        """Start to compute the exact answers of coming cases that fit, while the function runs another case."""
        for case in cases:
            if case not in self.ahead and self.affordable(case):
                self.ahead[case] = self.pool.submit(self._prepared, case)

    def _prepared(self, case: Case) -> tuple[Call, Exact]:
        call = call_of(self.signature, case, values.draw(case), self.precision)
        return call, exact(call, gradients=bool(call.request["leaves"]) and not self.forward_only)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def run(
        self,
        case: Case,
        relation: str = "accuracy",
        *,
        change: Mapping[str, Tensor] | None = None,
        known: Exact | None = None,
        memory: str = "",
        **mode: Any,
    ) -> Outcome:
        """Call the function on a case, and judge its answers. Raises StopError.

        Args:
            case: The case.
            relation: The property that the call tests, for the report.
            change: Tensors in place of the case's own, bhsd.
            known: Exact answers to compare with; by default they are computed from the tensors.
            memory: How inputs share memory, see `values.shared`.
            mode: Further entries of the request, see `Worker.ask`: leaves, views, reuse, twice, no_grad, …
        """
        ahead = self.ahead.pop(case, None)
        if ahead is not None and not change:
            call, limits_and_rows = ahead.result()
            known = known or (None if mode else limits_and_rows)
        else:
            own = {n: t for n, t in (change or {}).items() if n not in _SECOND}
            call = call_of(self.signature, case, values.draw(case) | own, self.precision)
        request = call.request | mode
        if self.forward_only or case.forward:
            request["leaves"] = []
        if not self.extra:
            request["leaves"] = [name for name in request["leaves"] if name not in _EXTRA]
        if request["leaves"] and self.signature.packed and "leaves" in mode:
            request["leaves"] = call.request["leaves"]
        if not request["leaves"]:
            request.pop("twice", None)
        sent = call.tensors if request["leaves"] else {n: t for n, t in call.tensors.items() if n != "do"}
        sent = sent | {n: from_bhsd(t, self.signature.layout) for n, t in (change or {}).items() if n in _SECOND}
        if memory:
            sent = values.shared(sent, memory, "thd" if self.signature.ragged else self.signature.layout)
        if "autocast" in mode:  # the inputs have float32, and hold what the case's type holds
            sent = {n: t.float() if t.is_floating_point() else t for n, t in sent.items()}
        if relation == "accuracy" and not mode and self.worker.random.random() < _MANY:
            request["num_threads"] = 2  # an answer must not depend on it, nor a function know the judge by it
        repeated = None if change else mode | ({"memory": memory} if memory else {})
        outcome = Outcome(case, call, relation, request=request, mode=repeated)
        self._ask([outcome], sent, [known])
        return outcome

    def together(self, case: Case, other: Case, relation: str, **mode: Any) -> list[Outcome]:
        """Call the function on two cases, both forwards before the first backward; return both outcomes."""
        outcomes, requests = [], []
        sent: dict[str, Tensor] = {}
        for n, each in enumerate((case, other)):
            call = call_of(self.signature, each, values.draw(each), self.precision)

            def named(x: Any, n: int = n) -> Any:
                return {"tensor": f"{n}.{x['tensor']}"} if isinstance(x, dict) else x

            sent |= {f"{n}.{name}": t for name, t in call.tensors.items()}
            requests.append({
                "args": [named(x) for x in call.request["args"]],
                "kwargs": {name: named(x) for name, x in call.request["kwargs"].items()},
                "leaves": [f"{n}.{name}" for name in call.request["leaves"] if self.extra or name not in _EXTRA],
                "upstream": f"{n}.do",
            })  # fmt: skip
            outcomes.append(Outcome(each, call, relation, request=call.request, mode=None))
        for outcome in outcomes:
            outcome.request = {"calls": requests, "leaves": outcome.request["leaves"]} | mode
        self._ask(outcomes, sent, [None, None])
        return outcomes

    def _ask(self, outcomes: list[Outcome], sent: Mapping[str, Tensor], known: Sequence[Exact | None]) -> None:
        """Send a call, or two at once, and judge their answers."""
        clock = self.clock
        if clock.left < 0:
            raise StopError("there was no time left")
        if self.ended > 5:
            raise StopError("the function's process had ended too often")
        limit = min(self.timeout, max(5.0, clock.left))
        try:
            self.worker.ask(outcomes[0].request, sent)
            exacts = [
                each or exact(o.call, gradients=bool(o.request["leaves"]))
                for o, each in zip(outcomes, known, strict=True)
            ]  # fmt: skip
            facts, answers = self._answer(limit)
        except EndedError as error:
            if error.kind == "hang" and limit < self.timeout and clock.calls:  # the end came first: it may be slow
                raise StopError("there was no time left") from None
            self.ended += 1 + (error.kind == "hang")
            for outcome in outcomes:
                outcome.status, outcome.text = "ended", str(error)
                outcome.facts["ended"] = error.kind
            return
        clock.calls += 1
        clock.kernel += facts.get("seconds", 0.0)
        for n, outcome in enumerate(outcomes):
            own, given = answers, facts
            if len(outcomes) > 1:
                ours = {name: t for name, t in answers.items() if name.startswith("1.") == bool(n)}
                own = {name.removeprefix("1.").replace(f"{n}.", ""): t for name, t in ours.items()}
                given = {x: v for x, v in facts.items() if x[:2] != "1." and (not n or x not in _OF_CALL)}
                given |= {x[2:]: v for x, v in facts.items() if n and x[:2] == "1."}
                given["unused"] = [name.partition(".")[2] for name in given.get("unused", ())]
            self._settle(outcome, given, own, exacts[n])
            if outcome.status == "right":
                self._judge(outcome)

    def _settle(self, outcome: Outcome, facts: dict[str, Any], answers: dict[str, Tensor], known: Exact) -> None:
        outcome.facts = facts
        error = facts.get("error")
        if error is None:
            case = outcome.case
            self.timed.append((max(1000, case.scores), case.programs, facts.get("seconds", 0.0)))
        if error is not None:
            self._refused(outcome, error)
            return
        if "grad_error" in facts and not answers:
            self._refused(outcome, facts["grad_error"])
            return
        if "bad" in facts:
            outcome.status, outcome.text = "wrong", facts["bad"]
            return
        outcome.answers, bad = outcome.call.canonical(answers, any_type="autocast" in outcome.request)
        if bad is not None:
            outcome.status, outcome.text = "wrong", bad
            return
        limits, ill = known
        outcome.limits, outcome.ill_rows = limits, ill
        outcome.ill = float(ill.float().mean()) if ill.numel() else 0.0

    def _answer(self, timeout: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Wait for the answer from the function's process, and return it. Raises EndedError."""
        start = time.monotonic()
        try:
            return self.worker.answer(timeout)
        finally:
            self.clock.waiting += time.monotonic() - start

    def _refused(self, outcome: Outcome, error: Mapping[str, Any]) -> None:
        outcome.text = f"it raised {error['type']}: {error['text']}"
        outcome.facts["raised"] = error
        outcome.status = "refused"
        if error["type"] in _BUGS or not error["clear"] or any(word in error["text"] for word in _CUDA):
            outcome.status = "wrong"
            if error["type"] == "AssertionError" and error["clear"]:
                outcome.status = "refused"
        if error["memory"]:
            outcome.status = "ended"
        if "0 active drivers" in error["text"]:
            raise UnusableError(
                "it calls a Triton kernel, which needs a GPU: set TRITON_INTERPRET=1 to run it in Triton's interpreter"
            )
        if any(word in error["text"] for word in _CUDA):  # a CUDA error of this kind affects all later calls
            self.worker.stop()

    def repeat(self, case: Case, within: float, times: int) -> tuple[Outcome, list[Outcome]]:
        """Repeat a call with the same inputs.

        Return an outcome for all calls, and one for each answer with other bits.
        """
        call = call_of(self.signature, case, values.draw(case), self.precision)
        request = call.request | {"within": within, "times": times}
        if self.forward_only or case.forward:
            request["leaves"] = []
        outcome = Outcome(case, call, "repeated calls", request=request)
        clock = self.clock
        if clock.left < 0:
            raise StopError("there was no time left")
        try:
            sent = call.tensors if request["leaves"] else {n: t for n, t in call.tensors.items() if n != "do"}
            self.worker.ask(request, sent)
            limits, _ = exact(call, gradients=bool(request["leaves"]))
            facts, answers = self._answer(self.timeout + within)
        except EndedError as error:
            self.ended += 1
            outcome.status, outcome.text = "ended", str(error)
            outcome.facts["ended"] = error.kind
            return outcome, []
        clock.kernel += facts.get("seconds", 0.0)
        clock.calls += facts.get("calls", 0)
        outcome.facts, outcome.limits = facts, limits
        raised = facts.get("error") or facts.get("grad_error")
        if (raised is not None or "bad" in facts) and facts.get("calls", 0) < 2:  # the first call fails
            outcome.status = "refused"
        elif raised is not None or "bad" in facts:
            outcome.status = "wrong"
            what = facts["bad"] if raised is None else f"it raised {raised['type']}: {raised['text']}"
            outcome.text = f"call {facts.get('calls', 0)} of equal ones differs: {what}"
        outcomes = []
        for number in facts.get("other", []):
            of_call = {n.partition(".")[2]: t for n, t in answers.items() if n.partition(".")[0] == str(number)}
            each = Outcome(case, call, "repeated calls", request=request, limits=limits)
            each.answers, bad = call.canonical(of_call)
            if bad is None:
                self._judge(each)
            outcomes.append(each)
        return outcome, outcomes

    def _judge(self, outcome: Outcome) -> None:
        case, facts, limits = outcome.case, outcome.facts, outcome.limits
        problems = []
        for name, answer in outcome.answers.items():
            if name not in limits:
                continue
            if self.nan_rows and name not in ("lse", "dsinks"):
                answer = self._without_empty(name, answer, outcome)
                outcome.answers[name] = answer
            if answer.shape != limits[name].value.shape:
                problems.append(f"{name} has shape {list(answer.shape)}, not {list(limits[name].value.shape)}")
                continue
            strict, loose = limits[name].excess(answer, outcome.dtype_of(name))
            outcome.strict[name] = float(strict.max()) if strict.numel() else 0.0
            outcome.excess[name] = float(loose.max()) if loose.numel() else 0.0
        if "grad_error" in facts:
            error = facts["grad_error"]
            outcome.text = f"its gradient raised {error['type']}: {error['text']}"
            if error["type"] != "NotImplementedError":  # which means that the function has no gradient
                problems.append(outcome.text)
        leaves = [n for n in outcome.request["leaves"] if n not in _EXTRA]
        unused = [n for n in facts.get("unused", ()) if n in leaves]
        if unused and len(unused) < len(leaves):
            problems.append(f"no gradient reaches {', '.join(unused)}")
        if facts.get("changed"):
            problems.append(f"the call changes its input {', '.join(facts['changed'])}")
        if facts.get("overwritten"):
            problems.append(f"the call overwrites {', '.join(facts['overwritten'])} of an earlier call")
        if facts.get("overwritten_by_second"):
            problems.append("the second backward overwrites the gradients of the first")
        for name, other in facts.get("aliases", ()):
            problems.append(
                f"{name} shares memory with {'the input ' + other if other != 'an earlier answer' else other}"
            )
        if facts.get("state") and "compile" not in outcome.request:  # the compiler starts threads
            problems.append(f"the call changes torch's {', '.join(facts['state'])}")
        if any(ratio > 1 for ratio in outcome.excess.values()) or problems:
            outcome.status = "wrong"
        elif any(ratio > 1 for ratio in outcome.strict.values()):
            outcome.status = "imprecise"
        outcome.text = "; ".join(filter(None, [outcome.text, *dict.fromkeys(problems)]))
        key = (case.dtype, case.shape, case.options)
        self.accepted.add(key)
        if facts.get("grad") and outcome.request["leaves"] and "grad_error" not in facts:
            self.with_gradients.add(key)

    def _without_empty(self, name: str, answer: Tensor, outcome: Outcome) -> Tensor:
        """Return an answer without the NaN that rows without keys may have.

        Such a NaN becomes 0 in o and dq, and the right value in dk and dv.
        """
        lse = outcome.limits["lse"].value
        empty = lse == -math.inf
        if not bool(empty.any()):
            return answer
        if name == "dattn_mask":
            return answer.where(~answer.isnan(), outcome.limits[name].value.to(answer.dtype))
        if name in ("o", "dq") and answer.shape[:-1] == empty.shape:
            return answer.masked_fill(empty[..., None] & answer.isnan(), 0.0)
        if name in ("dk", "dv") and answer.shape == outcome.limits[name].value.shape:
            # NaN of one row without keys spreads to dk and dv of all keys of its head: ignore NaN in these heads.
            heads = empty.any(-1).unflatten(1, (outcome.case.kv_heads, -1)).any(-1)  # type: ignore[no-untyped-call]
            spoilt = heads[..., None, None] & answer.isnan()
            return torch.where(spoilt, outcome.limits[name].value.to(answer.dtype), answer)
        return answer

    def affordable(self, case: Case) -> bool:
        """Return whether a case fits into the remaining time, estimated from earlier calls.

        Ignore the first call, and use the fastest of the large calls: slower ones may include imports or compilation.
        Each program takes at least as long as in the call with the fastest ones, which an interpreter runs in turn.
        """
        known = self.timed[1:]
        largest = max((scores for scores, _, _ in known), default=0)
        rate = min((seconds / scores for scores, _, seconds in known if 4 * scores >= largest), default=0.0)
        each = min((seconds / programs for _, programs, seconds in known), default=0.0)
        expected = max(rate * case.scores, each * case.programs)
        return expected < min(0.3 * self.timeout, max(1.0, self.clock.left / 4))


class _Cache:
    """Exact answers that are kept for further calls, and for the next function; the oldest are dropped."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Any, Exact] = OrderedDict()
        self.bytes = 0
        self.lock = threading.Lock()

    def get(self, key: Any) -> Exact | None:
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
            return self.kept.get(key)

    def put(self, key: Any, exact: Exact) -> None:
        with self.lock:
            if key not in self.kept:
                self.kept[key] = exact
                self.bytes += _bytes(exact)
            while self.bytes > CACHE_BYTES and len(self.kept) > 1:
                self.bytes -= _bytes(self.kept.popitem(last=False)[1])


_cache = _Cache()


def _bytes(exact: Exact) -> int:
    return sum(3 * 8 * limits.value.numel() for limits in exact[0].values())


def exact(call: Call, *, gradients: bool) -> Exact:
    """Return the limits of all answers of a call, and its ill-posed rows."""
    inputs = [t for n, t in call.tensors.items() if n != "cu_seqlens_q"]
    sums = tuple((tuple(t.shape), float(t.double().nan_to_num(7).sum())) for t in inputs)
    key = (call.case, gradients, call.problem.spec.options, sums, call.signature.ragged)
    limits_and_rows = _cache.get(key)
    if limits_and_rows is None:
        masks = [n for n in ANSWERS[5:] if n[1:] in call.tensors and call.tensors[n[1:]].is_floating_point()]
        limits_and_rows = bounds.limits(call.problem, (*OUTPUTS, *masks) if gradients else OUTPUTS[:2])
        _cache.put(key, limits_and_rows)
    return limits_and_rows
