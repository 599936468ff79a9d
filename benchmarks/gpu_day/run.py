"""Run stages on a device: record each row as soon as it is measured, and stop a stage when the time is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.gpu_day import checkout, plan, suites
from benchmarks.gpu_day.device import Clocks, Cuda
from benchmarks.gpu_day.guard import Answer, Guard, Pool
from benchmarks.gpu_day.plan import Group, Suite, Task
from benchmarks.gpu_day.record import Record, Row, current, is_bad, latest
from benchmarks.record import now

DESCRIBE_SECONDS = 90.0
COMPILE_SECONDS = 150.0  # seconds that the parallel compilations of a group may take
LOG = "tests.log"
RESERVE_SECONDS = 20.0  # seconds kept for the report and the cache at the end


class Run:
    """One call of `make gpu`: a record, a device, and a time limit by `clock`, which tests may replace."""

    record: Record

    def __init__(self, device: Cuda, seconds: float, clock: Callable[[], float], commit: str) -> None:
        self.device, self._clock = device, clock
        self._until = clock() + seconds - RESERVE_SECONDS
        self.environment: Row = {"commit": commit}
        self.guard = Guard(device)
        self.pool = Pool(device, device.processes)
        self.clocks = Clocks(device.clocks)
        self._anew: set[str] = set()  # keys to measure again: the rows that they already have do not count

    @property
    def left(self) -> float:
        """Return the seconds until the time limit."""
        return self._until - self._clock()

    def find_device(self) -> bool:
        """Describe the device in a guarded process; return False if there is none. Raises RuntimeError on failure."""
        answer = self.guard.ask("describe", None, DESCRIBE_SECONDS)
        if answer.failed:
            raise RuntimeError(f"the device could not be described: {answer.failed}")
        if answer.result is None:
            return False
        folders = {"sources": plan.SOURCES, "measuring": plan.MEASURING, "tests": plan.TESTS}
        self.environment |= answer.result | {name: checkout.sources(*each) for name, each in folders.items()}
        return True

    def measure_failures_again(self) -> None:
        """Mark the keys whose newest row is bad, so that the stages measure them again."""
        self._anew = {key for key, row in self.done().items() if is_bad(row)}

    def close(self) -> None:
        self.guard.close()
        self.pool.close()
        self.clocks.close()
        if hasattr(self, "record"):
            self.record.close()

    def stage(self, name: str) -> bool:
        """Run a stage, and return whether it is complete."""
        if name in self.device.suites:
            ended = [self._suite(name, suite) for suite in self.device.suites[name]]
            return all(ended)
        groups = plan.groups(name, self.device.sizes, self.environment)
        whole = all(self._group(name, group) for group in groups)
        done, keys = self.done(), [task.key for group in groups for task in group.tasks]
        print(f"{name}: {sum(key in done for key in keys)} of {len(keys)} measured", flush=True)
        return whole

    def done(self) -> dict[str, Row]:
        """Return the newest row of each key in the current environment, except the keys to measure again."""
        newest = latest(current(self.record.rows, self.environment))
        return {key: row for key, row in newest.items() if key not in self._anew}

    def _group(self, stage: str, group: Group) -> bool:
        """Measure the tasks of a group that have no row. Return False if time ran out."""
        done = self.done()
        missing = [task for task in group.tasks if task.key not in done]
        failed = {key for key, row in done.items() if key.startswith("smoke ") and is_bad(row)}
        for task in list(missing):
            if reasons := [name for name in task.needs if f"smoke {name}" in failed]:
                print(f"{task.key}: left out, for these smoke tests failed: {', '.join(reasons)}", flush=True)
                missing.remove(task)
        if group.apart:
            return self._apart(stage, missing)
        self._compile(missing)
        return all(self._timed(stage, task) for task in missing)

    def _apart(self, stage: str, tasks: list[Task]) -> bool:
        """Run the tasks in parallel, each in its own process. Return False if time ran out."""
        begin = time.monotonic()
        answers = self.pool.ask_all("perform", tasks, self._limit, apart=True)
        return sum(self._write(stage, task, answer, begin) for task, answer in answers) == len(tasks)

    def _compile(self, tasks: list[Task]) -> None:
        """Compile the kernels of the tasks in parallel. Ignore failures: they occur again when the task is timed."""
        different = {task.compiles: task for task in tasks if task.compiles is not None}
        if len(different) < 2:
            return
        until = time.monotonic() + COMPILE_SECONDS

        def seconds(_task: Task) -> float:
            return min(self.left, until - time.monotonic())

        for task, answer in self.pool.ask_all("compile", list(different.values()), seconds, apart=False):
            if answer.failed:
                print(f"compiling {task.key}: {answer.failed}", flush=True)

    def _timed(self, stage: str, task: Task) -> bool:
        """Measure one task alone on the device. Return False if there is no time for it."""
        limit = self._limit(task)
        if limit <= 0:
            return False
        begin = time.monotonic()
        answer = self.guard.ask("perform", task, limit)
        if answer.lost and not answer.fresh and not answer.timed_out:
            return self._timed(stage, task)  # in a new process, because an earlier task in the old one may be the cause
        return self._write(stage, task, answer, begin)

    def _limit(self, task: Task) -> float:
        return min(task.limit, self.left)

    def _write(self, stage: str, task: Task, answer: Answer, begin: float) -> bool:
        """Write a row to disk. If the task ended because the time was over, write nothing and return False."""
        if answer.timed_out and self.left <= 0:
            return False
        row = self._row(stage, plan.OF_OURS if task.ours else plan.OF_PEERS) | {
            "key": task.key,
            "at": now(),
            "seconds": round(time.monotonic() - begin, 3),
            "clocks": self.clocks.since(begin),
            "task": plan.parameters(task),
        }
        self.record.append(row | ({"failed": answer.failed} if answer.failed else {"result": answer.result}))
        self._anew.discard(task.key)
        print(f"{task.key}: {answer.failed or _brief(answer.result)}", flush=True)
        return True

    def _row(self, stage: str, names: Sequence[str]) -> Row:
        """Return the fields common to a stage's rows. `names`: fields of the environment that affect the results."""
        return {"stage": stage, "of": {name: self.environment[name] for name in names}, "environment": self.environment}

    def _suite(self, stage: str, suite: Suite) -> bool:
        """Run the tests of a suite that have no outcome yet. Return False if time ran out."""
        if suite.name.startswith("hopper") and self.environment["capability"] != "9.0":
            return True
        if self.left <= 0:
            return False
        prefix = f"test {suite.name} "
        row = self._row(stage, (*plan.OF_OURS, "tests"))
        known = [key.removeprefix(prefix) for key in self.done() if key.startswith(prefix)]
        log = self.record.path.with_name(LOG)
        code = suites.run(suite, self.record.path, row, known, self.device.name, self.device.processes, self.left, log)
        self.record.reload()
        count = Counter(r["result"]["outcome"] for key, r in self.done().items() if key.startswith(prefix))
        print(f"{suite.name}: pytest's exit code {code}; {dict(count)}", flush=True)
        ended = code in (0, 1, 5)  # 5: pytest found no test to run
        if not ended and code != suites.CUT_OFF:
            print(log.read_text(errors="replace")[-3000:], flush=True)
        return ended


def _brief(result: Row) -> str:
    """Return a short summary of a row's result."""
    if "ok" in result:
        return "ok" if result["ok"] else f"WRONG: {result['errors']} {result['missing']}"
    if result.get("ms") is not None:
        more = f", {result['tflops_standard']:.0f} TFLOP/s" if result.get("tflops_standard") else ""
        return f"{result['ms']:.4g} ms{more}"
    return next((f"{name}: {result[name]}" for name in ("skipped", "refused", "wrong_by") if result.get(name)), "?")
