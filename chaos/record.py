"""`python -m chaos.record FILES` summarises result files of `make chaos` into benchmarks/results/."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, machine_name, text


def summary(files: list[Path]) -> dict[str, Any]:
    """Return the summary of several runs. The file of a run has its environment, then one line per round."""
    runs, faults, calls = [], defaultdict(list), Counter[str]()
    violations: list[str] = []
    rounds = 0
    for file in files:
        first, *rows = (json.loads(line) for line in file.read_text().splitlines())
        injected = sum(len(row["faults"]) for row in rows)
        runs.append({**first, "rounds": len(rows), "faults": injected})
        rounds += len(rows)
        for row in rows:
            violations += row["violations"]
            for fault in row["faults"]:
                faults[fault["fault"]].append((fault, row["recovery"]))
    table = []
    for name, injections in sorted(faults.items()):
        outcomes = sum((Counter(fault["calls"]) for fault, _ in injections), Counter[str]())
        calls += outcomes
        recoveries = [recovery for _, recovery in injections if recovery is not None]
        effects = Counter(re.sub(r"[\d.]+ s", "… s", fault["did"]) for fault, _ in injections)
        table.append(
            {
                "fault": name,
                "injected": len(injections),
                "calls": dict(outcomes.most_common()),
                "did": dict(effects.most_common(6)),
                "recovery_median": round(statistics.median(recoveries), 2) if recoveries else None,
            }
        )
    return {
        "runs": runs,
        "injected": sum(row["injected"] for row in table),
        "rounds": rounds,
        "calls": dict(calls.most_common()),
        "violations": violations,
        "faults": table,
    }


def main() -> int:
    result = summary([Path(name) for name in sys.argv[1:]])
    device = machine_name(result["runs"][0]["environment"])
    path = ROOT / "benchmarks" / "results" / f"faults-{device}.json"
    path.write_text(text(result))
    print(f"{path}: {result['injected']} faults in {result['rounds']} rounds, {len(result['violations'])} violations")
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
