"""Functions that the modules of tables share: register a table, write Markdown, and name the machine of a result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "\nnot measured\n"
Result = dict[str, Any]
TABLES: dict[str, Callable[[], str]] = {}  # the function that makes each table, by the name in the table's marks


def named(make: Callable[[], str]) -> Callable[[], str]:
    """Register a function that makes a table. The table has the function's name, with dashes for underscores."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def by_machine(
    what: str, *packages: str, name: str = ""
) -> Callable[[Callable[[Result], str]], Callable[[Result], str]]:
    """Return a decorator for a function that makes the text of one machine's result WHAT-*.json.

    It registers the table `name` (by default `what`), which has the texts of all machines. A line above each text has
    the machine and the versions of `packages`; a text that begins with one of ";:," continues this line.
    """

    def register(text_of: Callable[[Result], str]) -> Callable[[Result], str]:
        def texts() -> Iterator[str]:
            for result in results(what):
                text, made = text_of(result), made_on(result["environment"], *packages)
                yield f"\n{made}{text}" if text.startswith((";", ":", ",")) else f"\n{made}:\n\n{text}"

        TABLES[name or what] = lambda: "".join(texts()) or NOT_MEASURED
        return text_of

    return register


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def results(what: str) -> Iterator[Result]:
    """Yield the content of each file benchmarks/results/WHAT-*.json, with the file's `stem`. Each is of one machine.

    In earlier records of a CPU, the backend `cpu` is called `torch`.
    """
    for path in sorted(RESULTS.glob(f"{what}-*.json")):
        result = json.loads(path.read_text()) | {"stem": path.stem}
        for row in result["rows"] if isinstance(result.get("rows"), list) else ():
            if row.get("backend") == "torch" and result["environment"].get("kind") != "cuda":
                row["backend"] = "cpu"
        yield result


def made_on(made: Result, *packages: str) -> str:
    """Return a text with the machine of a result, its load, the packages' versions, the date and the commit."""
    load = f"load average {round(made['load_average'][0], 2)} at the start"
    versions = (f"{name} {made[name]}" for name in packages)
    device = f"{made['device']} ({made['kernels']})" if made.get("kernels") else made["device"]
    return ", ".join(
        [device, f"{made['cores']} cores", load, *versions, made["date"][:10], f"commit {made['commit'][:10]}"]
    )


def targets(result: Result) -> str:
    """Return a table of the result's targets: what was measured, what was wanted, and whether it is met."""
    rows = []
    for row in result["targets"]:
        bound = f"at least {row['at_least']:.4g}" if "at_least" in row else f"at most {row['at_most']:.4g}"
        rows.append((row["what"], f"{row['value']} {row['unit']}", bound, "yes" if row["met"] else "no"))
    return table(["", "measured", "wanted", "met"], rows)


def targets_by_machine(what: str) -> str:
    """Return a table of a benchmark's targets, with a column of measurements for each machine. Marks missed targets."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    machines = []
    for result in results(what):
        made = result["environment"]
        machines.append(machine := f"{made['device']}, {made['date'][:10]}, `{made['commit'][:10]}`")
        for row in result["targets"]:
            bound = f"at least {row['at_least']:.4g}" if "at_least" in row else f"at most {row['at_most']:.4g}"
            # Remove the name of the fastest peer, which differs between machines. The full table has the name.
            name = re.sub(r"(: over the [^(]*) \(.*", r"\1", row["what"])
            said = f"{row['value']:.4g}" + ("" if row["met"] else ", **missed**")
            found.setdefault((name, f"{bound} {row['unit']}"), {})[machine] = said
    rows = ((*key, *(said.get(machine, "") for machine in machines)) for key, said in found.items())
    return "\n" + table(["", "target", *machines], rows) if machines else NOT_MEASURED


def verdicts(result: Result) -> str:
    """Return a table of the questions that a load test answers: what was found, what was wanted, whether it is met."""
    rows = ((v["question"], v["found"], v["wanted"], "yes" if v["met"] else "no") for v in result["verdicts"])
    return table(["question", "found", "wanted", "met"], rows)
