"""Tables about the way of a warm call through the code, from benchmarks/request_path.py and small_call.py."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .markdown import NOT_MEASURED, ROOT, Result, by_machine, made_on, named, results, table

SERVER = "flashpoint_server"
LIVES = {"call": "each call", "connection": "each connection", "plan": "once for a head or plan", "process": "once"}


def _result() -> Result | None:
    """Return the last result. It hardly depends on the machine, so one is enough."""
    return max(results("request-path"), key=lambda result: result["environment"]["date"], default=None)


def _says(module: str, name: str) -> str:
    """Return the first sentence of a class's docstring."""
    path = ROOT / "server" / (module.replace(".", "/") + ".py")
    (found,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name.rpartition(".")[2]
    )
    text = " ".join((ast.get_docstring(found) or "").split())
    return text.partition(". ")[0].rstrip(".")


def _file(module: str) -> str:
    return module.removeprefix(SERVER + ".").replace(".", "/") + ".py"


@named
def call_classes() -> str:
    """Return every class that a warm `POST /attention` makes or passes on, and how long its objects live."""
    if (result := _result()) is None:
        return NOT_MEASURED
    by_class: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        by_class.setdefault((row["module"], row["name"]), {})[row["process"]] = row["life"]
    order = list(LIVES)
    rows = []
    for (module, name), lives in by_class.items():
        life = min(lives.values(), key=order.index)
        if life != "process":
            where = " and ".join(sorted(lives, key=str.lower, reverse=True))
            rows.append((order.index(life), f"`{name}`", f"`{_file(module)}`", _says(module, name), LIVES[life], where))
    rows.sort(key=lambda row: (row[0], row[2], row[1]))
    once = [f"`{name}`" for (_, name), lives in sorted(by_class.items()) if set(lives.values()) == {"process"}]
    head = ("class", "file in `server/flashpoint_server/`", "is or knows", "made", "in")
    counts = [f"{sum(row[4] == made for row in rows)} {made}" for life, made in LIVES.items() if life != "process"]
    said = f"\nMade: {', '.join(counts)}.\n\nMade once, for the process: {', '.join(once)}.\n"
    return "\n" + table(head, [row[1:] for row in rows]) + said


@named
def call_path() -> str:
    """Return the files, calls and runs of each kind of call in each process."""
    if (result := _result()) is None:
        return NOT_MEASURED
    rows = []
    for mode, processes in result["counts"].items():
        for process, counts in processes.items():
            rows.append((mode, process, *_numbers(counts)))
    return f"\n{made_on(result['environment'])}:\n\n" + table(("call", "process", "files", "calls", "runs"), rows)


def _numbers(counts: dict[str, int]) -> Iterable[int]:
    return (counts[name] for name in ("files", "calls", "runs"))


@by_machine("small-call", "python", "uvicorn")
def small_call(result: Result) -> str:
    """Return the microseconds of a small call by stage, and the functions that take most of them."""
    medians, processor = result["median_microseconds"], result["processor_microseconds"]
    stages = [(name, microseconds) for name, microseconds in medians.items()]
    stages += [(f"processor time, {name}", microseconds) for name, microseconds in processor.items()]
    text = f"; medians of {result['calls']:,} calls.\n\n" + table(("", "µs"), stages)
    for process, rows in result["functions"].items():
        lines = ((f"`{row['function']}`", row["calls"], row["microseconds"]) for row in rows)
        text += f"\n{process}, under the profiler:\n\n" + table(("function", "calls", "own processor time, µs"), lines)
    return text
