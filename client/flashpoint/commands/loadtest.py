"""`flashpoint loadtest`: the basic scenario of the load tests, against any server, with the SDK alone.

Callers of a closed loop call again as soon as their answer comes. Each answer is compared with attention in float64.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from flashpoint._client.client import Client
from flashpoint.commands import running
from flashpoint.commands.app import RIGHT, WRONG, examples
from flashpoint.commands.running import INTS, Json, Key, Timeout, group
from flashpoint.commands.terminal.tables import fitting
from flashpoint.errors import FlashpointError

EXAMPLES = """
  flashpoint loadtest
  flashpoint loadtest --url http://localhost:9000 --callers 1,8,32 --seconds 10
"""
CALLERS = (1, 2, 4, 8, 16)
BOUND = 5e-6  # allowed error of a float32 answer, as a fraction of the answer's largest value
# Each call: queries, keys, query heads, key heads, and whether it is a gradient. The dimension of a head is 64.
CALLS = (
    (128, 128, 8, 8, False), (128, 128, 8, 8, False), (128, 128, 4, 4, True), (333, 333, 4, 2, False),
    (100, 100, 4, 2, True), (1, 2048, 8, 2, False),
)  # fmt: skip
DIM = 64
_WRONG = "wrong answer"
REFUSED = ("429", "503", "504")  # an overloaded server may answer with these

_of_load = group("Load")
Array = NDArray[Any]


@dataclass(frozen=True)
class _Case:
    tensors: Mapping[str, Array]
    expected: Mapping[str, Array]

    def ask(self, client: Client) -> Mapping[str, Array]:
        """Send the call, and return its answer. Raises FlashpointError."""
        q, k, v = (self.tensors[name] for name in "qkv")
        if "do" in self.tensors:
            gradients = client.attention_grad(self.tensors["do"], q, k, v, causal=True)
            return dict(zip(self.expected, gradients, strict=True))
        return {"o": client.attention(q, k, v, causal=True)}

    def wrong(self, answer: Mapping[str, Array]) -> str | None:
        """Return how an answer is wrong; None if it is right."""
        for name, right in self.expected.items():
            error = np.abs(answer[name] - right).max() / np.abs(right).max()
            if not error <= BOUND:
                return f"{_WRONG}: {name} is wrong by {error:.1e} of its largest value"
        return None


@dataclass
class _Step:
    """One number of callers, and the outcomes of the calls that began within `seconds`."""

    callers: int
    seconds: float = 0.0
    milliseconds: list[float] = field(default_factory=list)  # of right answers
    errors: Counter[str] = field(default_factory=Counter)
    busy: float = 0.0  # cores that this program used

    def row(self) -> dict[str, Any]:
        times = np.percentile(self.milliseconds, (50, 95, 99)) if self.milliseconds else [None] * 3
        return {
            "callers": self.callers,
            "calls_per_second": round(len(self.milliseconds) / self.seconds, 1) if self.seconds else 0.0,
            **{
                f"p{part}_ms": None if ms is None else round(float(ms), 1)
                for part, ms in zip((50, 95, 99), times, strict=True)
            },
            "right": len(self.milliseconds),
            "errors": dict(self.errors.most_common()),
            "cores_of_this_program": round(self.busy, 2),
        }


@examples(EXAMPLES)
def loadtest(
    callers: Annotated[Any, _of_load("Numbers of callers, one step each.", show_default="1,2,4,8,16", **INTS)] = None,
    seconds: Annotated[float, _of_load("Seconds of each step.", min=0.1)] = 3.0,
    url: Annotated[
        str | None,
        running.of_server("The server.", envvar="FLASHPOINT_URL", show_default="http://localhost:8000"),
    ] = None,
    api_key: Key = None,
    timeout: Timeout = 30.0,
    json: Json = None,
) -> int:
    """Put load on a server, check each answer against float64, and print rate and latency.

    Forwards, gradients and a step of decoding, in float32, by callers that call again as soon as an answer comes. The
    cores of this machine are shared if the server runs here. Nothing is sent again. Exit code 1: a wrong answer, or an
    error that no overload explains.
    """
    running.check_file("--json", json)
    steps = CALLERS if callers is None else callers
    if wrong := [each for each in steps if not 1 <= each <= 1024]:
        raise typer.BadParameter(f"must be 1 to 1024, not {wrong[0]}", param_hint="--callers")
    cases = [_case(*call) for call in CALLS]
    show = running.console(json)
    done: list[_Step] = []
    ended: int | None = None
    with (
        Client(url, api_key=api_key, timeout=timeout, retries=0) as client,
        running.terminable(),
        running.progress_bar() as (update, _),
    ):
        for case in cases:  # the first calls measure the start of the kernels; an error here ends the command
            case.ask(client)
        try:
            for number, count in enumerate(steps):
                update(completed=number, total=len(steps), description=f"{count} callers")
                done.append(_run(client, cases, count, seconds))
        except KeyboardInterrupt as end:
            ended = running.code_of(end)  # the exception itself would keep connections alive
    rows = [step.row() for step in done]
    show.print(_table(rows, show.width))
    errors: Counter[str] = sum((step.errors for step in done), Counter())
    for error, times in errors.most_common():
        show.print(f"{times} x {error}", markup=False)
    if (limit := own_limit(rows)) is not None:
        show.print(limit, style="yellow")
    load = os.getloadavg()[0]
    show.print(f"load average of this machine: {load:.1f} on {os.cpu_count()} cores", style="dim")
    running.write_json(json, {"url": client.url, "seconds": seconds, "steps": rows, "load_average": load})
    failed, note = verdict(errors, sum(len(step.milliseconds) for step in done))
    if note:
        show.print(note, style="yellow")
    show.print(f"FAIL: {failed}" if failed else "every answer is right", style="bold red" if failed else "green")
    return ended if ended is not None else WRONG if failed else RIGHT


def own_limit(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note if this program, and not the server, may have limited a step with right answers; else None."""
    if any(row["right"] and row["cores_of_this_program"] > 0.9 for row in rows):
        return "this program was busy all the time: the server may answer more than it asked"
    return None


def verdict(errors: Mapping[str, int], right: int) -> tuple[str | None, str | None]:
    """Return why a load test fails, None if it does not, and a note on the limit of the key, if calls met it."""
    note = "key_limit is a limit of this API key: the server may answer more" if "429 key_limit" in errors else None
    others = [error for error in errors if not error.startswith(REFUSED)]
    if any(error.startswith(_WRONG) for error in others):
        return "answers are wrong", note
    if others:
        return f"calls failed, and not by overload: {', '.join(others)}; read the server's log", note
    return None if right else "no call was answered", note


def _case(q_len: int, kv_len: int, heads: int, kv_heads: int, grad: bool) -> _Case:
    rng = np.random.default_rng((q_len, kv_len, grad))
    shapes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len)}
    shapes |= {"do": shapes["q"]} if grad else {}
    tensors = {name: rng.standard_normal((1, *shape, DIM), np.float32) for name, shape in shapes.items()}
    return _Case(tensors, exact(tensors))


def exact(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return o, or the gradients if there is `do`, of causal attention in float64."""
    q, k, v = (tensors[name].astype(np.float64) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    keys, values, scale = k.repeat(group, 1), v.repeat(group, 1), q.shape[-1] ** -0.5
    s = scale * q @ keys.swapaxes(-1, -2)
    s = np.where(np.tri(s.shape[-2], s.shape[-1], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = p @ values
    if "do" not in tensors:
        return {"o": o}
    do = tensors["do"].astype(np.float64)
    ds = scale * p * (do @ values.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True))
    shared = (1, k.shape[1], group, -1, DIM)  # query heads of one key head lie beside each other
    dk, dv = (each.swapaxes(-1, -2) @ by for each, by in ((ds, q), (p, do)))
    return {"dq": ds @ keys, "dk": dk.reshape(shared).sum(2), "dv": dv.reshape(shared).sum(2)}


def _run(client: Client, cases: Sequence[_Case], callers: int, seconds: float) -> _Step:
    """Let `callers` threads call for `seconds`, and return the outcomes."""
    step, lock, ended = _Step(callers), threading.Lock(), threading.Event()

    def call(seed: int) -> None:
        draw = random.Random(seed)
        while not ended.is_set():
            case, began = draw.choice(cases), time.perf_counter()
            try:
                answer = case.ask(client)
            except FlashpointError as refused:
                error: str | None = f"{refused.status or type(refused).__name__} {refused.code or ''}".strip()
            else:
                took = time.perf_counter() - began
                error = case.wrong(answer)
            with lock:
                if error is None:
                    step.milliseconds.append(took * 1e3)
                else:
                    step.errors[error] += 1

    threads = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(callers)]
    began, computed = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    try:
        ended.wait(seconds)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    step.seconds = time.perf_counter() - began
    step.busy = (time.process_time() - computed) / step.seconds
    return step


def _table(rows: Sequence[dict[str, Any]], width: int) -> Any:
    titles = {
        "callers": "callers", "calls/s": "calls_per_second", "p50 ms": "p50_ms", "p95 ms": "p95_ms", "p99 ms": "p99_ms",
        "right": "right",
    }  # fmt: skip
    columns = {title: ["–" if row[key] is None else f"{row[key]:,}" for row in rows] for title, key in titles.items()}
    columns["errors"] = [f"{sum(row['errors'].values()):,}" for row in rows]
    return fitting(columns, width, ())
