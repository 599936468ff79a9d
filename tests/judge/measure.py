"""Judge the corpus; write each kernel's verdict and causes: python -m tests.judge.measure [--quick] [NAME…]."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, commit, environment, text

SECONDS = 1200.0  # time limit of each judgement: none of its cases may be left out because others use the machine


def judged(name: str, *, quick: bool, seed: int) -> dict[str, Any]:
    """Judge one kernel in this process, and return its row of the results, {column: value}."""
    import flashpoint_kernels
    from tests.judge.corpus import RIGHT, WRONG

    function = WRONG[name].function if name in WRONG else RIGHT[name]
    report = flashpoint_kernels.judge(function, quick=quick, seed=seed, seconds=SECONDS)
    codes = [cause.code for cause in report.causes]
    row: dict[str, Any] = {
        "name": name, "wrong": name in WRONG, "group": "right ones", "verdict": report.verdict, "codes": codes,
        "confirmed": [cause.code for cause in report.causes if cause.confirmed], "seed": seed, "quick": quick,
        "caught": report.verdict == "wrong", "seconds": report.seconds, "judge_seconds": report.judge_seconds,
        "cases": report.cases, "calls": report.calls, "versions": report.versions,
        "failures": [[f.problem, f.relation, f.text[:200]] for f in report.failures[:3]],
        "causes": [cause.text for cause in report.causes],
        "relation": report.smallest.relation if report.smallest else None,
        "case": report.smallest.case if report.smallest else None,
    }  # fmt: skip
    if name in WRONG:
        wrong = WRONG[name]
        row |= {"group": wrong.group, "text": wrong.text, "named": bool(set(codes[:3]) & set(wrong.codes))}
        row |= {"falsely_confirmed": [code for code in row["confirmed"] if code not in wrong.codes]}
    return row


def gates(name: str) -> dict[str, bool]:
    """Return {check: whether a kernel passes it}, of o and gradients for Gaussian inputs, with and without causal.

    `allclose` allows an error of 1e-2 + 1e-2·|exact| from float64. `twice` allows twice the error of the formula in the
    inputs' type, as flash-attn's tests do, plus 1e-5. A function that does not take (q, k, v, causal) has no checks.
    """
    import torch

    from tests.judge.corpus import RIGHT, WRONG
    from tests.judge.right import formula

    function = WRONG[name].function if name in WRONG else RIGHT[name]
    if name == "flash_layout":  # this kernel takes and returns (batch, length, heads, D)
        inner = function

        def function(q: Any, k: Any, v: Any, **options: Any) -> Any:
            return inner(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)

    close = twice = True
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n, m, dim, causal in ((128, 128, 64, True), (100, 100, 128, False), (33, 77, 40, False)):
            generator = torch.Generator().manual_seed(n)
            shapes = [(2, 4, n, dim), (2, 2, m, dim), (2, 2, m, dim), (2, 4, n, dim)]
            q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)

            def answers(call: Callable[..., Any], *leaves: Any, causal: bool = causal) -> list[Any]:
                own = [t.clone().requires_grad_() for t in leaves[:3]]
                o = call(*own, causal)
                o = o[0] if isinstance(o, tuple) else o
                answer = [o.detach()]
                if o.requires_grad:
                    answer += torch.autograd.grad(o, own, leaves[3].to(o.dtype))
                return [t.double() for t in answer]

            exact = answers(formula, *(t.double() for t in (q, k, v, do)))
            usual = answers(formula, q, k, v, do)
            keyword = "is_causal" if name.startswith("sdpa") else "causal"
            try:
                own = answers(
                    lambda q, k, v, c, keyword=keyword, m=m, n=n: function(q, k, v, **{keyword: c}
                        | ({"enable_gqa": True} if keyword == "is_causal" else {})), q, k, v, do)  # fmt: skip
            except (RuntimeError, ValueError, NotImplementedError):
                continue
            except TypeError:
                return {}
            for x, y, z in zip(own, exact, usual, strict=False):
                close &= torch.allclose(x, y, 1e-2, 1e-2)
                twice &= bool((x - y).abs().max() <= 2 * (z - y).abs().max() + 1e-5)
    return {"allclose": close, "twice": twice}


def measured(name: str, *, quick: bool, seed: int) -> dict[str, Any]:
    """Return the row of a kernel in the results. If the judge itself fails, its verdict is "error"."""
    import torch

    from tests.judge.corpus import WRONG

    try:
        return judged(name, quick=quick, seed=seed) | gates(name)
    except Exception as error:
        nothing: dict[str, Any] = {"verdict": "error", "codes": [], "caught": False, "named": False, "relation": None}
        group = WRONG[name].group if name in WRONG else "right ones"
        return {"name": name, "wrong": name in WRONG, "group": group, "error": repr(error)[-800:], **nothing}
    finally:
        torch.set_default_dtype(torch.float32)  # one wrong kernel changes it


def _code() -> str:
    """Return the commit in words, and whether the judge or the corpus differ from it."""
    command = ["git", "status", "--porcelain", "kernels", "tests/judge"]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return f"commit {commit()[:10]}{' with changes that were not committed' if changed else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=Path, help="file to which each row is added as it comes; rows in it are kept")
    parser.add_argument("--collect", action="store_true", help="judge nothing; write the rows of --rows to --json")
    parser.add_argument("--note", default="", help="what a reader of the record must know")
    given = parser.parse_args()
    from flashpoint_kernels.judging import trial
    from tests.judge.corpus import RIGHT, WRONG

    trial.CACHE_BYTES = 4 << 30  # kernels share cached exact answers, so each takes fewer seconds than alone
    known = {}
    if given.rows and given.rows.exists():
        known = {row["name"]: row for row in map(json.loads, given.rows.read_text().splitlines())}
    names = [*known] if given.collect else given.names or [*WRONG, *RIGHT]
    code, device = _code(), environment()["device"]
    rows = []
    for name in names:
        start = time.monotonic()
        row = known.get(name) or measured(name, quick=given.quick, seed=given.seed) | {"code": code, "device": device}
        rows.append(row)
        if name in known:
            continue
        if given.rows:
            with given.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
        mark = "ok" if row["caught"] == row["wrong"] and row.get("named", True) else "??"
        print(f"{mark} {name}: {row['verdict']} {row['codes']} {time.monotonic() - start:.1f} s", row.get("error", ""))
        if row["caught"] != row["wrong"]:
            print("   ", row.get("failures"))
        sys.stdout.flush()
    wrong = [row for row in rows if row["wrong"]]
    blamed = [row["name"] for row in rows if not row["wrong"] and row["verdict"] not in ("right", "imprecise")]
    summary = {
        "wrong": len(wrong), "caught": sum(row["caught"] for row in wrong),
        "named": sum(row["named"] for row in wrong), "right": len(rows) - len(wrong), "blamed": blamed,
    }  # fmt: skip
    print(summary)
    if given.json:
        codes, devices = (" and ".join(sorted({row[name] for row in rows})) for name in ("code", "device"))
        about = {
            "command": f"python -m tests.judge.measure{' --quick' * given.quick} --seed {given.seed} --rows FILE",
            "code": codes, "device": devices, "kernels": len(WRONG) + len(RIGHT), "note": given.note,
        }  # fmt: skip
        given.json.write_text(text(about | {"summary": summary, "rows": rows}))


if __name__ == "__main__":
    main()
