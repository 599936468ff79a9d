"""Count the places where tests reach into private names of the packages: `python tests/private.py [FILES]`.

A place is an import of a name with a leading underscore from a package, or such an attribute of anything but `self`
and `cls`, other than of another library's module. Tests with such places break when only the implementation changes.
Names that Python or Jupyter document, such as those of named tuples, are public in spite of their underscore.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = ("_asdict", "_fields", "_fields_", "_make", "_replace", "_repr_html_", "_repr_svg_")
OURS = ("flashpoint", "flashpoint_contract", "flashpoint_kernels", "flashpoint_server", "tests", "benchmarks")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def root_of(node: ast.expr) -> str:
    """Return the name at the beginning of `a.b.c`; "" if there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def places(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each place in a source."""
    nodes = list(ast.walk(ast.parse(text)))
    others = {"self", "cls"}
    for node in nodes:
        if isinstance(node, ast.Import):
            others |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] not in OURS}
        if isinstance(node, ast.ImportFrom):
            ours = (node.module or "").split(".")[0] in OURS
            others |= set() if ours else {a.asname or a.name for a in node.names}
            yield from ((node.lineno, a.name) for a in node.names if ours and is_private(a.name))
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root_of(node.value) not in others:
            yield node.lineno, node.attr


def main(names: list[str]) -> None:
    files = [Path(name) for name in names] or sorted((ROOT / "tests").rglob("*.py"))
    found = {file: list(places(file.read_text())) for file in files}
    for file, here in found.items():
        for line, name in here if names else ():
            print(f"{file}:{line}: {name}")
    print(f"{sum(map(len, found.values()))} places in {sum(map(bool, found.values()))} of {len(files)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
