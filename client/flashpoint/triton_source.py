"""Find, without importing torch, that a function needs a GPU: each of its calls launches a Triton kernel."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

# Files of which a Linux system with a GPU has one: NVIDIA's, AMD's, those of Windows' subsystem, and Intel's.
_DEVICES = ("nvidia*", "kfd", "dxg", "dri/render*")
_CONDITIONAL = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def lacks_gpu(module: str, function: str, devices: Path = Path("/dev")) -> bool:
    """Return whether a function certainly needs a GPU that this machine lacks.

    False means nothing: it looks only at the source of a module in a file of sys.path, on Linux. `devices` is the
    folder of the system's devices.
    """
    if sys.platform != "linux" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return False
    if any(next(devices.glob(name), None) for name in _DEVICES) or not _runs_on_gpus_alone():
        return False
    files = (Path(folder, *module.split(".")).with_suffix(".py") for folder in sys.path)
    try:
        text = next(filter(Path.is_file, files)).read_bytes()
        return b"TRITON_INTERPRET" not in text and launches(ast.parse(text), function)
    except (StopIteration, OSError, SyntaxError, ValueError):
        return False  # the import reports it


def _runs_on_gpus_alone() -> bool:
    """Return whether Triton is installed, without its backend for CPUs."""
    triton = find_spec("triton")
    return triton is not None and not any(
        Path(part, "backends", "cpu").exists() for part in triton.submodule_search_locations or ()
    )


def launches(source: ast.Module, function: str) -> bool:
    """Return whether a function of a module launches one of its Triton kernels in each call that returns.

    A launch in a branch does not count, nor one behind a return in a branch: the function may do something else.
    """
    jit, functions = _names_of_jit(source), {}
    for each in source.body:
        if isinstance(each, ast.FunctionDef):
            functions[each.name] = each
        elif isinstance(each, ast.ClassDef):  # an autograd function: `apply` calls its `forward`
            forward = [one for one in each.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
            functions |= {f"{each.name}.apply": one for one in forward}
    kernels = {
        name for name, one in functions.items()
        if any(ast.unparse(decorator).partition("(")[0] in jit for decorator in one.decorator_list)
    }  # fmt: skip

    def reaches(name: str, seen: frozenset[str]) -> bool:
        if name in seen or name in kernels or name not in functions:
            return False
        for called in (call.func for call in _calls(functions[name].body)):
            if isinstance(called, ast.Subscript):  # kernel[grid](…)
                if isinstance(called.value, ast.Name) and called.value.id in kernels:
                    return True
            elif reaches(ast.unparse(called), seen | {name}):
                return True
        return False

    return reaches(function, frozenset())


def _names_of_jit(source: ast.Module) -> set[str]:
    """Return the names that `triton.jit` has in a module."""
    names = set()
    for each in source.body:
        if isinstance(each, ast.Import):
            names |= {f"{one.asname or one.name}.jit" for one in each.names if one.name == "triton"}
        elif isinstance(each, ast.ImportFrom) and each.module == "triton":
            names |= {one.asname or one.name for one in each.names if one.name == "jit"}
    return names


def _calls(body: Iterable[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the calls of the statements that run in any case, unless one before them raises an error."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _calls_of(item.context_expr for item in statement.items)
            if "suppress" not in ast.unparse(statement.items[0].context_expr):
                yield from _calls(statement.body)
        elif (
            isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return)
            and statement.value
        ):
            yield from _calls_of([statement.value])
        if any(isinstance(one, ast.Return) for one in ast.walk(statement)):
            return


def _calls_of(expressions: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls in expressions, without those that may not run."""
    for each in expressions:
        if not isinstance(each, _CONDITIONAL):
            if isinstance(each, ast.Call):
                yield each
            yield from _calls_of(ast.iter_child_nodes(each))
