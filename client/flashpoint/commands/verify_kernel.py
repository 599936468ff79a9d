"""`flashpoint verify --kernel MODULE:FUNCTION`: judge the caller's own function, by the judge of flashpoint_kernels."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from flashpoint.commands.app import RIGHT, WRONG, CommandError
from flashpoint.commands.running import check_file, console, progress_bar, write_json
from flashpoint.judging import judge_arguments, registered
from flashpoint.triton_source import lacks_gpu
from flashpoint_contract.judging import Report
from flashpoint_contract.wording.hints import how_to_install, meant


def parts_of(name: str) -> tuple[str, str]:
    """Return the module and the function of MODULE:FUNCTION. Raises CommandError; for the path of a file, the error's
    hint names the module to give instead.
    """
    module, colon, function = name.partition(":")
    if module.endswith(".py") or os.sep in module:
        path = Path(module)
        folder = "" if path.parent == Path() else f" in {path.parent}"
        raise CommandError(
            f"--kernel: must be MODULE:FUNCTION, not the file {module}",
            f"write --kernel {path.stem}:{function or 'FUNCTION'}{folder and f', and run it{folder}'}",
        )
    if not (module and colon and function):
        raise CommandError(f"--kernel: must be MODULE:FUNCTION, not {name!r}", "such as --kernel mykernels:attention")
    return module, function


def find_kernel(name: str) -> tuple[str, str]:
    """Let Python import modules of the current folder, and return the parts of MODULE:FUNCTION.

    Raises CommandError, also if the function certainly needs a GPU that this machine lacks. Does not import torch,
    which takes seconds.
    """
    module, function = parts_of(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if lacks_gpu(module, function):
        raise CommandError(
            "--kernel: it calls a Triton kernel, which needs a GPU: set TRITON_INTERPRET=1 to run it in Triton's "
            "interpreter",
            "docs/judge-my-kernel.md begins with such a kernel",
        )
    return module, function


def load_kernel(name: str) -> Callable[..., Any]:
    """Import and return the function MODULE:FUNCTION, also from the current folder. Raises CommandError."""
    module, function = find_kernel(name)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--kernel: there is no module {error.name}",
            "run the command in the folder of the module, or install the module",
        ) from error
    if not hasattr(imported, function):
        near = meant(function, [each for each in dir(imported) if not each.startswith("_")])
        raise CommandError(f"--kernel: {module} has no {function}", f"did you mean {near}?" if near else None)
    kernel: Callable[..., Any] = getattr(imported, function)
    if not callable(kernel):
        raise CommandError(f"--kernel: {name} must be a function, not {type(kernel).__name__}")
    return kernel


def judge(
    name: str, keywords: Mapping[str, Any], *, quick: bool, require: tuple[str, ...], case: str | None,
    seconds: float | None, empty_rows: str | None, save: Path | None, json_file: Path | None,
) -> int:  # fmt: skip
    """Judge a function, show the report, and return the exit code. Raises CommandError."""
    find_kernel(name)
    check_file("--json", json_file)
    check_file("--save", save)
    try:
        judge_function = registered()
    except ModuleNotFoundError as error:
        raise CommandError(f"--kernel: needs {error.name}, which is not installed", how_to_install("torch")) from None
    arguments = judge_arguments(keywords)
    if case is not None:
        try:
            arguments["only"] = json.loads(case)
        except ValueError as error:
            raise CommandError(f"--case: is not JSON: {error}", "copy it from the report") from None
    try:
        with progress_bar(counted=False) as (update, is_terminal):

            def progress(at: Any) -> None:
                update(completed=at.done, total=at.total, description=at.stage)

            report = judge_function(
                name, progress=progress if is_terminal else None, quick=quick, require=require, seconds=seconds,
                empty_rows=empty_rows, save=save, **arguments,
            )  # fmt: skip
    except ValueError as error:
        hint = "docs/judge-my-kernel.md shows what a function must look like"
        raise CommandError(f"--kernel: {error}", hint) from None
    show(report, console(json_file))
    write_json(json_file, report.to_dict())
    if save is not None and report.smallest is not None and report.saved is None:
        raise CommandError(f"--save: {save} cannot be written", code=WRONG)
    return RIGHT if report.ok else WRONG


def show(report: Report, to: Console) -> None:
    """Print a report."""
    styles = {
        "cause": "bold", "smallest failing case": "bold", "PASS": "green", "FAIL": "bold red", "unsupported": "dim",
        "not run": "dim", "no race in": "dim",
    }  # fmt: skip
    for line in report.lines():
        style = next((style for start, style in styles.items() if line.startswith(start)), None)
        to.print(line, style=style, markup=False, soft_wrap=True)  # a line of a report is one line of output
