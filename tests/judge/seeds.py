"""Judge right kernels on random single cases of many seeds: python -m tests.judge.seeds --seeds 500 --json FILE.

No verdict may be "wrong". A case draws everything from its seed: sizes, data type, options and values.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashpoint_kernels.judging.cases import random_case
from flashpoint_kernels.judging.process import Worker, target_of
from flashpoint_kernels.judging.signatures import signature_of
from flashpoint_kernels.judging.trial import Clock, Trial
from tests.judge.corpus import RIGHT

ROOT = Path(__file__).parents[2]
BLOCK = 50  # seeds that all kernels run before the next seeds: the exact answers of so few cases stay in memory
TAKES = ("causal",)  # options that all right kernels accept


class Judged:
    """A right kernel in a separate process, which runs the cases of all seeds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker = Worker(target_of(RIGHT[name]), "cpu")
        signature = signature_of(self.worker.start())
        self.trial = Trial(
            self.worker, signature, Clock(1e9), precision="ieee", timeout=60.0, nan_rows=signature.style == "sdpa"
        )

    def verdict(self, seed: int) -> tuple[str, dict[str, Any] | None]:
        """Return the verdict on the random case of a seed, and the failure if the verdict is "wrong" there."""
        case = random_case(seed, TAKES)
        if self.trial.signature.refuses(case) is not None:
            return "refused", None
        outcome = self.trial.run(case)
        if outcome.status == "refused":
            outcome = self.trial.run(replace(case, forward=True))
        if not outcome.failed:
            return outcome.status, None
        return outcome.status, {"name": self.name, "case": case.to_dict(), "text": outcome.failure().text}

    def close(self) -> None:
        self.trial.close()
        self.worker.close()


def verdicts_of(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the name, verdict and failure of each kernel for the random case of each seed."""
    torch.set_num_threads(1)
    for name in names:
        kernel = Judged(name)
        try:
            for seed in seeds:
                yield name, *kernel.verdict(seed)
        finally:
            kernel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="right kernels; by default all")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=100_000, help="first seed; constants were fitted on none of these")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", default="", help="what a reader of the record must know")
    given = parser.parse_args()
    start, verdicts, wrong, done = time.monotonic(), Counter[tuple[str, str]](), [], 0
    names = given.names or list(RIGHT)
    for first in range(given.first, given.first + given.seeds, BLOCK):
        if time.monotonic() - start > 60 * given.minutes:
            break
        seeds = range(first, min(first + BLOCK, given.first + given.seeds))
        for name, verdict, failure in verdicts_of(names, seeds):
            verdicts[name, verdict] += 1
            if failure is not None:
                wrong.append(failure)
                print(json.dumps(failure), flush=True)
        done += len(seeds)
        print(f"{done} seeds, {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    counts: Counter[str] = Counter()
    for (_, verdict), number in verdicts.items():
        counts[verdict] += number
    record = {
        "command": f"python -m tests.judge.seeds --seeds {given.seeds}", "seeds": done, "first": given.first,
        "kernels": len(given.names or RIGHT), "verdicts": counts, "blamed": wrong,
        "minutes": round((time.monotonic() - start) / 60, 1), "commit": git.stdout.strip()[:10],
        "cpu": next((x.partition(":")[2].strip() for x in lines if "model name" in x), ""), "torch": torch.__version__,
        "note": given.note,
    }  # fmt: skip
    print(json.dumps(record | {"blamed": len(wrong)}))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
