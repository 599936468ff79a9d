"""Fuzz each target in turn, store its inputs in .fuzz, and then send raw HTTP to a server (`make fuzz`).

    python -m tests.fuzz.run [--minutes 10] [--only TARGET …] [--record]

The exit status is 1 if an input broke a target. Then .fuzz contains the input, and stderr has the reason. `--record`
writes the results to benchmarks/results/fuzz.json, which keeps its results of targets that did not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, environment, text
from tests.fuzz.http_cases import all_cases
from tests.fuzz.http_fuzz import attack
from tests.fuzz.http_server import SETTINGS, Attacked
from tests.fuzz.targets import TARGETS
from tests.support.servers import serve

CORPUS, FOUND = Path(__file__).parent / "corpus", ROOT / ".fuzz"
RESULT = ROOT / "benchmarks" / "results" / "fuzz.json"
HTTP = "http"
MUTATED = 1000  # mutated cases in a round, beside the fixed cases


def fuzz(target: str, seconds: int) -> dict[str, Any]:
    """Fuzz a target and return its result: libFuzzer's statistics, and `failed` if an input broke the target."""
    folder = FOUND / target
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "tests.fuzz.hunt", target, folder, CORPUS / target, f"-max_total_time={seconds}",
        f"-artifact_prefix={FOUND}/{target}-",
    ]  # fmt: skip
    started = time.monotonic()
    ran = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    (FOUND / f"{target}.log").write_text(ran.stderr)
    if ran.returncode:
        print("\n".join(ran.stderr.splitlines()[-40:]), file=sys.stderr)
    counted = {name: int(n) for name, n in re.findall(r"^stat::(\w+):\s+(\d+)$", ran.stderr, re.MULTILINE)}
    reached = re.findall(r"cov: (\d+)", ran.stderr)
    return {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "executions": counted.get("number_of_executed_units", 0),
        "edges": int(reached[-1]) if reached else 0,
        "slowest_seconds": counted.get("slowest_unit_time_sec"),
        "peak_mib": counted.get("peak_rss_mb"),
        "failed": ran.returncode != 0,
    }


def fuzz_http(seconds: int) -> dict[str, Any]:
    """Run rounds of the HTTP fuzzer, each with another seed, against one server; return the result."""
    server = serve(**SETTINGS)
    try:
        attacked = Attacked(server)
        began, seed, cases, statuses, wrong = time.monotonic(), 0, 0, Counter[int](), []
        while time.monotonic() - began < seconds:
            report = asyncio.run(attack(attacked.port, all_cases(attacked.body, seed, MUTATED), attacked.right))
            cases, seed = cases + report.cases, seed + 1
            statuses += report.statuses
            wrong += report.wrong
        wrong += attacked.faults()
    finally:
        server.stop()
    for line in wrong:
        print(line, file=sys.stderr)
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "executions": cases,
        "statuses": {str(status) if status else "closed": n for status, n in sorted(statuses.items())},
        "failed": bool(wrong),
    }


def record(results: dict[str, dict[str, Any]]) -> None:
    about = environment("atheris")
    recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(text({**recorded, **{name: {**about, **one} for name, one in results.items()}}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=[*TARGETS, HTTP], default=[*TARGETS, HTTP])
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args(argv)
    failed = False
    for name in arguments.only:
        seconds = round(arguments.minutes * 60)
        result = fuzz_http(seconds) if name == HTTP else fuzz(name, seconds)
        print(name, json.dumps(result), flush=True)
        failed |= result["failed"]
        if arguments.record:
            record({name: result})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
