"""`flashpoint verify --kernel MODULE:FUNCTION`: judge the caller's own function on a grid of shapes and options."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashpoint.commands.app import RIGHT, WRONG, CommandError
from flashpoint.verdicts import KernelCase, findings
from flashpoint_contract.hints import meant

MOST = 3  # number of wrong cases that are shown in full


def load_kernel(name: str) -> Callable[..., Any]:
    """Import and return the function MODULE:FUNCTION, also from the current folder. Raises CommandError."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise CommandError(f"--kernel: must be MODULE:FUNCTION, not {name!r}", "such as --kernel mykernels:attention")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--kernel: there is no module {error.name}",
            "run the command in the folder of the module, or install the module",
        ) from error
    if not hasattr(found, function):
        near = meant(function, [each for each in dir(found) if not each.startswith("_")])
        raise CommandError(f"--kernel: {module} has no {function}", f"did you mean {near}?" if near else None)
    kernel: Callable[..., Any] = getattr(found, function)
    if not callable(kernel):
        raise CommandError(f"--kernel: {name} must be a function, not {type(kernel).__name__}")
    return kernel


def judge(cases: Iterator[KernelCase], total: int, show: Console) -> tuple[list[KernelCase], int]:
    """Show each case when it is judged, and then the mistakes. Return the cases and the exit code."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    stderr = Console(stderr=True)
    done: list[KernelCase] = []
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("judging", total=total)
        for case in cases:
            done.append(case)
            bar.update(task, completed=len(done), description=case.problem)
    show.print(_table(done))
    failed = [case for case in done if not case.ok and case.report is not None]
    for case in failed[:MOST]:
        show.print(f"\n{case.problem}", style="bold")
        assert case.report is not None
        for line in findings(case.report, case.request.layout, case.mistakes):
            show.print(line, markup=False)
    if len(failed) > MOST:
        show.print(f"\n{len(failed) - MOST} more are wrong; --json FILE has all", style="dim")
    judged = [case for case in done if not case.skipped and (case.report is None or case.report.tensors)]
    wrong = sum(not case.ok for case in judged)
    reports = [case.report for case in done if case.report is not None]
    gradients = any(t.name in ("dq", "dk", "dv") for report in reports for t in report.tensors)
    if reports and not gradients:
        show.print("\nno gradient was judged: autograd finds none on the function's o", markup=False)
        show.print("hint: call your backward from a torch.autograd.Function", markup=False)
    if not judged:
        show.print("[bold red]FAIL[/]: no case could be judged")
        return done, WRONG
    passed = f"[green]PASS[/]: {len(judged)} cases{'' if gradients else ', forward only'}"
    show.print(f"[bold red]FAIL[/]: {wrong} of {len(judged)} cases" if wrong else passed)
    return done, WRONG if wrong else RIGHT


def _table(cases: list[KernelCase]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "case", "judged", "error / bound"):
        table.add_column(name, overflow="fold")
    for case in cases:
        verdict = "skipped" if case.skipped else "[green]PASS[/]" if case.ok else "[bold red]FAIL[/]"
        if case.report is None or not case.report.tensors:
            table.add_row(verdict if case.report is None else "–", case.problem, "", case.note)
            continue
        worst = max(case.report.tensors, key=lambda t: t.max_abs / t.bound if t.bound else float(t.max_abs > 0))
        names = ", ".join(t.name for t in case.report.tensors)
        table.add_row(verdict, case.problem, names, f"{worst.name} {worst.max_abs:.1e} / {worst.bound:.1e}")
    return table
