"""The judge's verdicts on its corpus of kernels, and on right kernels in random cases.

They come from benchmarks/results/judge-*.json.
"""

from __future__ import annotations

import json

from .markdown import NOT_MEASURED, RESULTS, Result, named, table

CHECKS = ("allclose", "twice")


@named
def judge_groups() -> str:
    """Return a table of the result's kernels by group: the judge's verdicts and names, and what two usual checks say.

    Rows of a record made before groups and confirmed causes were written have neither.
    """
    path = RESULTS / "judge-corpus.json"
    if not path.exists():
        return NOT_MEASURED
    groups: dict[str, list[Result]] = {}
    for row in json.loads(path.read_text())["rows"]:
        groups.setdefault(row.get("group") or ("wrong ones" if row["wrong"] else "right ones"), []).append(row)
    if len(groups) > 2:
        groups["all wrong ones"] = [row for rows in groups.values() for row in rows if row["wrong"]]
    groups["right ones"] = groups.pop("right ones", [])

    def line(group: str, rows: list[Result]) -> tuple[object, ...]:
        fails = (sum(not row.get(check, True) for row in rows) for check in CHECKS)
        if group == "right ones":
            return group, len(rows), f"{sum(row['caught'] for row in rows)} (blamed)", "", "", "", *fails
        named = sum(any(code != "unknown" for code in row["codes"]) for row in rows)
        confirmed = [row["falsely_confirmed"] for row in rows if "falsely_confirmed" in row]
        false = sum(map(bool, confirmed)) if len(confirmed) == len(rows) else "not recorded"
        return group, len(rows), sum(row["caught"] for row in rows), named, sum(r["named"] for r in rows), false, *fails

    head = ("group", "kernels", "called wrong", "named", "named rightly", "falsely confirmed")
    return "\n" + table((*head, *(f"`{check}` fails" for check in CHECKS)), (line(*each) for each in groups.items()))


@named
def judge_corpus() -> str:
    """Return a table of the kernels in the result, with the judge's verdict and those of two usual checks."""
    path = RESULTS / "judge-corpus.json"
    if not path.exists():
        return NOT_MEASURED
    found = json.loads(path.read_text())
    rows, lines = found["rows"], []
    wrong = [row for row in rows if row["wrong"]]
    right = [row for row in rows if not row["wrong"]]

    def passed(row: dict[str, object], check: str) -> str:
        return "" if check not in row else "passes" if row[check] else "fails"

    for row in [*wrong, *right]:
        named = ", ".join(row["codes"]) or "nothing"
        verdict = row["verdict"] if row["wrong"] else f"{row['verdict']} (a right kernel)"
        seconds = f"{row['seconds']:.0f} / {row['judge_seconds']:.0f}"
        lines.append((f"`{row['name']}`", verdict, named, seconds, *(passed(row, check) for check in CHECKS)))
    caught = sum(row["caught"] for row in wrong)
    named_count = sum(row["named"] for row in wrong)
    blamed = sum(row["caught"] for row in right)
    others = ", ".join(
        f"`{check}` fails {sum(not row.get(check, True) for row in wrong)} wrong and "
        f"{sum(not row.get(check, True) for row in right)} right ones"
        for check in CHECKS
    )
    text = (
        f"\n{found.get('device') or found['cpu']}, 2 cores that others used too, {found['code']}. Rows here: "
        f"{len(rows)} of {found['kernels']} kernels: {len(wrong)} wrong, {caught} of them caught and "
        f"{named_count} named; {len(right)} right, {blamed} of them blamed; {others}. {found['note']}\n\n"
    )
    return text + table(("kernel", "verdict", "causes", "seconds, judge's own", *CHECKS), lines)


@named
def judge_seeds() -> str:
    """Return how often the judge called a right kernel wrong, in random cases."""
    path = RESULTS / "judge-seeds.json"
    if not path.exists():
        return NOT_MEASURED
    found = json.loads(path.read_text())
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in found["verdicts"].items())
    blamed = ", ".join(sorted({f"`{each['name']}`" for each in found["blamed"]}))
    return (
        f"\n{found['cpu']}, torch {found['torch']}, commit {found['commit']}: {found['kernels']} right kernels in the "
        f"cases of {found['seeds']} seeds from {found['first']} on: {verdicts}; {len(found['blamed'])} blamed"
        f"{': ' + blamed if blamed else ''}. {found.get('note', '')}\n\n"
    )
