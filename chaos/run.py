"""Run rounds of faults under load, from a seed. After each round, check the calls' outcomes and the resources."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos import cached, clients, files, keys, processes, resources
from chaos.load import Load
from chaos.questions import ask_alone
from chaos.service import MIB, Held, Service
from chaos.world import World

Fault = Callable[[World], "str | None"]

# The relative frequency of each fault. Faults that end the engine are rare, because a new engine starts slowly.
FAULTS: dict[Fault, float] = {
    clients.leave: 16, clients.read_slowly: 2, clients.write_slowly: 2, clients.fall_silent: 0.5,
    cached.leave_cached: 8, cached.fill_caches: 1, cached.fill_quota: 1, cached.expire: 2,
    processes.kill_engine: 0.4, processes.stop_engine: 3,
    processes.kill_http: 1, processes.kill_every_http: 0.7, processes.stop_http: 3, processes.stop_supervisor: 1,
    processes.kill_codec: 0.7, processes.stop_codec: 2,
    processes.restart: 0.15, processes.kill_service: 0.15,
    resources.few_descriptors_http: 2, resources.few_descriptors_engine: 1,
    resources.little_memory_http: 2, resources.little_memory_engine: 1, resources.little_memory_codec: 2,
    resources.fill_staging: 2, resources.fill_shm: 0.7, resources.slow_down: 2, resources.move_clock: 4,
    files.fill_disk: 1, files.remove_folder: 1, files.damage_keys: 1, files.remove_keys: 1,
}  # fmt: skip
HEAVY = {processes.kill_engine, processes.restart, processes.kill_service}  # a round has at most one of these
A_ROUND = (6, 25)  # range of the number of faults in a round; calls delayed by a fault may still wait at the next fault
BETWEEN = (0.0, 0.15)  # range of seconds between faults
CACHES = ("flashpoint_caches{", "flashpoint_cache_bytes{")  # prefixes of samples of two metrics, one for each engine
RECOVERY = 300.0  # timeout in seconds until the service is ready and answers every kind of question correctly
QUIET = 60.0  # timeout in seconds until a service without load is idle: a JSON process may still encode an answer
# Allowed growth of a process since the warm-up: a factor and an amount. The staging pool keeps slots that the warm-up
# did not need, up to --staging-bytes; each slot has two descriptors.
PRIVATE, DESCRIPTORS, THREADS = (1.3, 64 * MIB), (1.0, 128), (1.0, 2)


@dataclass
class Round:
    """A round. `faults` are (name, effect, seconds that it lasted, outcomes of calls until the next fault)."""

    faults: list[tuple[str, str, float, Counter[str]]] = field(default_factory=list)
    recovery: float | None = None
    violations: list[str] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)


class Chaos:
    """Starts `service` and the load, and runs rounds until `stop`."""

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
        """Run load without a fault: every answer must be right. Later rounds compare resources with this one."""
        result = self.look_under_load()
        assert not result.violations, result.violations
        self.baseline = result.held

    def look_under_load(self) -> Round:
        """Run a round without a fault."""
        self.load.go()
        self._asked(4 * len(self.load.callers))
        return self._look(Round())

    def round(self, faults: Iterable[Fault]) -> Round:
        """Run these faults under load, then check that all resources are released."""
        result, world = Round(), self.world
        self.load.go()
        self._asked(len(self.load.callers) // 2)
        self._outcomes()
        for fault in faults:
            began = time.monotonic()
            try:
                effect = fault(world)
            except OSError as error:  # an earlier fault of this round may break the fault's connection
                effect = f"no connection: {type(error).__name__}"
            if effect is not None:
                world.wait(*BETWEEN)
                result.faults.append((fault.__name__, effect, time.monotonic() - began, self._outcomes(result)))
        return self._look(result)

    def chosen(self, faults: Mapping[Fault, float] = FAULTS) -> list[Fault]:
        """Return random faults for a round, at most one of them heavy."""
        rng, names, weights = self.world.rng, list(faults), np.array(list(faults.values()))
        numbers = rng.choice(len(names), size=int(rng.integers(*A_ROUND)), p=weights / weights.sum())
        chosen: list[Fault] = []
        for fault in (names[int(number)] for number in numbers):
            if fault not in HEAVY or not HEAVY.intersection(chosen):
                chosen.append(fault)
        return chosen

    def stop(self) -> int:
        self.load.stop()
        code = self.service.terminate()
        self.service.discard()
        return code

    # Check what remains after a round

    def _look(self, result: Round) -> Round:
        """Wait until the service is ready; then, without load, check that probes succeed and resources are released."""
        ready = self.service.wait_ready(RECOVERY)
        began = time.monotonic()
        if stuck := self.load.pause():
            result.violations.append(f"no answer: {', '.join(stuck)}")
        trailing = self._outcomes(result)
        if result.faults:
            result.faults[-1][3].update(trailing)
        if ready is None:
            result.violations.append(f"not ready in {RECOVERY:g} s")
        probed = time.monotonic()
        # With several HTTP processes, one may report ready before another is ready. So repeat probes that are refused.
        again = self.service.workers > 1
        failed = self.load.probe(lambda: again and time.monotonic() < probed + RECOVERY)
        result.violations += [f"asked when it was ready: {what}" for what in failed]
        result.recovery = None if ready is None else ready + time.monotonic() - began
        self._counted = len(self.load.book.outcomes)
        self._quiet(result)
        result.violations += self.world.violations
        self.world.violations = []
        if self.service.server is not None:
            unforeseen = [line for line in self.service.server.lines if line.get("code") == "internal_error"]
            result.violations += [f"a 500 in the log: {line}" for line in unforeseen]
            self.service.server.lines.clear()
        return result

    def _quiet(self, result: Round) -> None:
        inside: dict[str, float] = {}
        end = time.monotonic() + self.quiet
        while time.monotonic() < end:
            samples = self.service.samples()
            names = ("flashpoint_queue_requests", "flashpoint_queue_bytes", "flashpoint_staging_slots")
            inside = {name: samples.get(name, -1) for name in names}
            inside |= {name: value for name, value in samples.items() if name.startswith(CACHES)}
            result.held = self.service.held()
            wrong = [f"{name} is {value:g}" for name, value in inside.items() if value] + self._kept(result.held)
            caches = {owner: self.service.caches(owner) for owner in (*keys.OWNERS, keys.SDK, keys.FILLER, keys.SMALL)}
            wrong += [f"caches of {owner}: {several}" for owner, several in caches.items() if several != []]
            if not wrong:
                return
            time.sleep(0.05)
        result.violations += [f"left over: {what}" for what in wrong]

    def _kept(self, by_role: dict[str, Held]) -> list[str]:
        wrong = []
        for role, now in by_role.items():
            if role not in self.baseline:
                continue  # JSON processes start when they are needed: there was none in the warm-up
            before = self.baseline[role]
            for name, (times, more) in (("private", PRIVATE), ("descriptors", DESCRIPTORS), ("threads", THREADS)):
                if getattr(now, name) > getattr(before, name) * times + more:
                    wrong.append(f"{role}: {name} {getattr(before, name)} before, {getattr(now, name)} now")
        http, engine = by_role.get("http"), by_role.get("engine")
        if http and engine and self.service.workers == 1 and engine.shared > http.shared:
            wrong.append(f"the engine maps {engine.shared} bytes of staging, the HTTP process {http.shared}")
        return wrong

    # Check the outcomes of calls

    def _asked(self, calls: int) -> None:
        """Wait until `calls` more calls have ended, for at most RECOVERY: a fault may leave no process that answers."""
        book, end = self.load.book, time.monotonic() + RECOVERY
        target = len(book.outcomes) + calls
        while len(book.outcomes) < target and time.monotonic() < end:
            time.sleep(0.01)

    def _outcomes(self, result: Round | None = None) -> Counter[str]:
        """Return the outcomes of calls since the previous use of this method; add forbidden outcomes to `result`."""
        new = self.load.book.outcomes[self._counted :]
        self._counted += len(new)
        counts: Counter[str] = Counter()
        for outcome in new:
            counts[f"{outcome.kind} {outcome.detail}" if outcome.kind == "refused" else outcome.kind] += 1
            bad = outcome.kind in ("wrong", "hung") or (outcome.kind == "lost" and not self.world.may_break(outcome))
            if bad:
                what = f"{outcome.caller}: {outcome.kind}, {outcome.detail}"
                (self.world.violations if result is None else result.violations).append(what)
        return counts


def row(number: int, result: Round) -> dict[str, Any]:
    """Return a round as plain data for JSON."""
    return {
        "round": number,
        "faults": [
            {"fault": name, "did": did, "seconds": round(seconds, 2), "calls": dict(calls)}
            for name, did, seconds, calls in result.faults
        ],
        "recovery": None if result.recovery is None else round(result.recovery, 2),
        "violations": result.violations,
        "held": {role: vars(each) for role, each in result.held.items()},
    }
