"""`python -m chaos.record FILES`: what rounds of faults have cost, from their files into benchmarks/results/."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, file_name


def summary(files: list[Path]) -> dict[str, Any]:
    """Each file is of one run: its environment, then a line a round."""
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
    for name, found in sorted(faults.items()):
        got = sum((Counter(fault["calls"]) for fault, _ in found), Counter[str]())
        calls += got
        recoveries = [recovery for _, recovery in found if recovery is not None]
        did = Counter(re.sub(r"[\d.]+ s", "… s", fault["did"]) for fault, _ in found)
        table.append(
            {
                "fault": name,
                "injected": len(found),
                "calls": dict(got.most_common()),
                "did": dict(did.most_common(6)),
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
    found = summary([Path(name) for name in sys.argv[1:]])
    device = file_name(found["runs"][0]["environment"]["device"])
    path = ROOT / "benchmarks" / "results" / f"faults-{device}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {found['injected']} faults in {found['rounds']} rounds, {len(found['violations'])} violations")
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
