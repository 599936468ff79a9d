"""`python -m tests.chaos.record FILES`: what rounds of faults have cost, from their files into benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    models = [x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "device": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
    }


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
    device = re.sub(r"[^a-z0-9]+", "-", found["runs"][0]["environment"]["device"].lower()).strip("-")
    path = ROOT / "benchmarks" / "results" / f"faults-{device}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: {found['injected']} faults in {found['rounds']} rounds, {len(found['violations'])} violations")
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
