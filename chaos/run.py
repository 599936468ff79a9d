"""Rounds of faults under load, from a seed; after each, what the callers got and what the service still holds."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos import cached, clients, keys, processes, resources
from chaos.load import Load
from chaos.questions import ask_alone
from chaos.service import MIB, Held, Service
from chaos.world import World

Fault = Callable[[World], "str | None"]

# The relative frequency of each fault. Faults that cost a start of torch are rarer.
FAULTS: dict[Fault, float] = {
    clients.leave: 16, clients.read_slowly: 2, clients.write_slowly: 2, clients.fall_silent: 0.5,
    cached.leave_cached: 8, cached.fill_caches: 1, cached.fill_quota: 1, cached.expire: 2,
    processes.kill_engine: 0.4, processes.stop_engine: 3,
    processes.kill_http: 1, processes.stop_http: 3, processes.stop_supervisor: 1,
    processes.kill_codec: 0.7, processes.stop_codec: 2,
    processes.restart: 0.15, processes.kill_service: 0.15,
    resources.few_descriptors_http: 2, resources.few_descriptors_engine: 1,
    resources.little_memory_http: 2, resources.little_memory_engine: 1, resources.little_memory_codec: 2,
    resources.fill_staging: 2, resources.fill_shm: 0.7, resources.slow_down: 2, resources.move_clock: 4,
}  # fmt: skip
HEAVY = {processes.kill_engine, processes.restart, processes.kill_service}  # one a round
A_ROUND = (6, 25)  # faults, each while callers of the one before still wait
BETWEEN = (0.0, 0.15)  # seconds
CACHES = ("flashpoint_caches{", "flashpoint_cache_bytes{")  # metrics of each engine
RECOVERY = 300.0  # seconds until it is ready and every kind of question is answered right
QUIET = 60.0  # seconds until nothing is inside, once nobody asks: a codec may still write an answer nobody waits for
# Allowed growth of a process since the warm-up: as a factor, and as an amount. Slots of sizes and in numbers that
# the warm-up did not need stay in the pool, up to --staging-bytes; two descriptors each.
PRIVATE, DESCRIPTORS, THREADS = (1.3, 64 * MIB), (1.0, 128), (1.0, 2)


@dataclass
class Round:
    """`faults` are (name, what it did, seconds that it lasted, what callers got while it was the last one)."""

    faults: list[tuple[str, str, float, Counter[str]]] = field(default_factory=list)
    recovery: float | None = None
    violations: list[str] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)


class Chaos:
    """Runs until `stop`; `service` is started by it."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        service.start()
        try:
            self._begin(seed)
        except BaseException:
            service.terminate(signal.SIGKILL)
            raise

    def _begin(self, seed: int) -> None:
        service = self.service
        assert service.wait_ready() is not None, "it did not get ready"
        self.load = Load(service, seed)
        for question in self.load.book.questions:
            ask_alone(service.port, question)
        self.world = World(service, self.load, np.random.default_rng(seed))
        self.load.start()
        self._counted, self.quiet = 0, QUIET
        self.baseline: dict[str, Held] = {}
        self.warm()

    def warm(self) -> None:
        """Load without a fault: everything is right, and what the processes hold then is what they may hold later."""
        found = self.look_under_load()
        assert not found.violations, found.violations
        self.baseline = found.held

    def look_under_load(self) -> Round:
        """A round without a fault."""
        self.load.go()
        self._asked(4 * len(self.load.callers))
        return self._look(Round())

    def round(self, faults: Iterable[Fault]) -> Round:
        """These faults under load, and a look at what is left."""
        found, world = Round(), self.world
        self.load.go()
        self._asked(len(self.load.callers) // 2)
        self._outcomes()
        for fault in faults:
            began = time.monotonic()
            try:
                did = fault(world)
            except OSError as error:  # its own connection broke: an earlier fault of this round may do that
                did = f"no connection: {type(error).__name__}"
            if did is not None:
                world.wait(*BETWEEN)
                found.faults.append((fault.__name__, did, time.monotonic() - began, self._outcomes(found)))
        return self._look(found)

    def drawn(self, faults: Mapping[Fault, float] = FAULTS) -> list[Fault]:
        """Those of a round, one that is heavy at most."""
        rng, several, weights = self.world.rng, list(faults), np.array(list(faults.values()))
        numbers = rng.choice(len(several), size=int(rng.integers(*A_ROUND)), p=weights / weights.sum())
        drawn: list[Fault] = []
        for fault in (several[int(number)] for number in numbers):
            if fault not in HEAVY or not HEAVY.intersection(drawn):
                drawn.append(fault)
        return drawn

    def stop(self) -> int:
        self.load.stop()
        code = self.service.terminate()
        self.service.discard()
        return code

    # Leftovers

    def _look(self, found: Round) -> Round:
        """Ready within the bound; then, with nobody asking: every question right, nothing inside, nothing kept."""
        ready = self.service.wait_ready(RECOVERY)
        began = time.monotonic()
        if stuck := self.load.pause():
            found.violations.append(f"no answer: {', '.join(stuck)}")
        trailing = self._outcomes(found)
        if found.faults:
            found.faults[-1][3].update(trailing)
        if ready is None:
            found.violations.append(f"not ready in {RECOVERY:g} s")
        probed = time.monotonic()
        # With several HTTP processes, one may say that it is ready when another is not yet.
        again = self.service.workers > 1
        failed = self.load.probe(lambda: again and time.monotonic() < probed + RECOVERY)
        found.violations += [f"asked when it was ready: {what}" for what in failed]
        found.recovery = None if ready is None else ready + time.monotonic() - began
        self._counted = len(self.load.book.outcomes)
        self._quiet(found)
        found.violations += self.world.violations
        self.world.violations = []
        if self.service.server is not None:
            unforeseen = [line for line in self.service.server.lines if line.get("code") == "internal_error"]
            found.violations += [f"a 500 in the log: {line}" for line in unforeseen]
            self.service.server.lines.clear()
        return found

    def _quiet(self, found: Round) -> None:
        inside: dict[str, float] = {}
        end = time.monotonic() + self.quiet
        while time.monotonic() < end:
            samples = self.service.samples() or {}
            names = ("flashpoint_queue_requests", "flashpoint_queue_bytes", "flashpoint_staging_slots")
            inside = {name: samples.get(name, -1) for name in names}
            inside |= {name: value for name, value in samples.items() if name.startswith(CACHES)}
            found.held = self.service.held()
            wrong = [f"{name} is {value:g}" for name, value in inside.items() if value] + self._kept(found.held)
            caches = {owner: self.service.caches(owner) for owner in (*keys.OWNERS, keys.SDK, keys.FILLER, keys.SMALL)}
            wrong += [f"caches of {owner}: {several}" for owner, several in caches.items() if several != []]
            if not wrong:
                return
            time.sleep(0.05)
        found.violations += [f"left over: {what}" for what in wrong]

    def _kept(self, held: dict[str, Held]) -> list[str]:
        wrong = []
        for role, now in held.items():
            if role not in self.baseline:
                continue  # started later: a JSON process, in its first round
            before = self.baseline[role]
            for name, (times, more) in (("private", PRIVATE), ("descriptors", DESCRIPTORS), ("threads", THREADS)):
                if getattr(now, name) > getattr(before, name) * times + more:
                    wrong.append(f"{role}: {name} {getattr(before, name)} before, {getattr(now, name)} now")
        http, engine = held.get("http"), held.get("engine")
        if http and engine and self.service.workers == 1 and engine.shared > http.shared:
            wrong.append(f"the engine maps {engine.shared} bytes of staging, the HTTP process {http.shared}")
        return wrong

    # Outcomes of the calls

    def _asked(self, calls: int) -> None:
        """Until so many calls have ended, or some time has passed: a fault may leave nobody to answer."""
        book, end = self.load.book, time.monotonic() + RECOVERY
        target = len(book.outcomes) + calls
        while len(book.outcomes) < target and time.monotonic() < end:
            time.sleep(0.01)

    def _outcomes(self, found: Round | None = None) -> Counter[str]:
        """Return the outcomes of calls since the last look; a forbidden outcome is a violation of `found`."""
        new = self.load.book.outcomes[self._counted :]
        self._counted += len(new)
        counts: Counter[str] = Counter()
        for outcome in new:
            counts[f"{outcome.kind} {outcome.detail}" if outcome.kind == "refused" else outcome.kind] += 1
            bad = outcome.kind in ("wrong", "hung") or (outcome.kind == "lost" and not self.world.may_break(outcome))
            if bad:
                what = f"{outcome.caller}: {outcome.kind}, {outcome.detail}"
                (self.world.violations if found is None else found.violations).append(what)
        return counts


def row(number: int, found: Round) -> dict[str, Any]:
    """A round, as JSON has it."""
    return {
        "round": number,
        "faults": [
            {"fault": name, "did": did, "seconds": round(seconds, 2), "calls": dict(calls)}
            for name, did, seconds, calls in found.faults
        ],
        "recovery": None if found.recovery is None else round(found.recovery, 2),
        "violations": found.violations,
        "held": {role: vars(held) for role, held in found.held.items()},
    }
