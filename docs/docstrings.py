"""Fill the parameter lists of docstrings, so that each keyword is described once and shown wherever it is taken.

`help()`, an editor and the site of the documentation read docstrings from the sources, so the text has to be in each of
them. `make_tables.py` calls this module, which writes

- the docstrings of the fields of a TypedDict that are parameters of `flashpoint_kernels.attention`, from its own;
- the `Keyword Args:` of a function with `**keywords: Unpack[…]`, from the fields' docstrings, and the entries of its
  `Args:` that have a text there, for `SHARED` functions;
- the `Args:` of `Options` and `AttentionOptions`, from the same texts;
- the docstrings of asyncio twins, from those of the classes and functions that they are twins of.

All other entries are written by hand, and stay.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flashpoint_contract.options import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
CLIENT, KERNELS = ROOT / "client/flashpoint", ROOT / "kernels/flashpoint_kernels"
CONTRACT = ROOT / "contract/flashpoint_contract"
FUNCTIONAL, KEYWORDS, JAX = KERNELS / "functional.py", CLIENT / "_keywords.py", CLIENT / "jax.py"
FILLED = (
    FUNCTIONAL, KEYWORDS, JAX, CLIENT / "_attending.py", CLIENT / "_caches.py", CLIENT / "_client.py",
    CLIENT / "sharded.py", CLIENT / "_shards/caches.py", CLIENT / "torch.py", CLIENT / "_runs.py",
    CLIENT / "_async_client.py", CLIENT / "options.py", CONTRACT / "options.py",
)  # fmt: skip
FROM_LIBRARY = {"Keywords", "Settled", "Problem", "Scales"}  # TypedDicts whose fields are `attention`'s parameters
SHARED = {(FUNCTIONAL, "attention_backward"), (JAX, "attention")}
WIDTH = 120
ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
HEADINGS = ("Args:", "Keyword Args:", "Returns:", "Raises:")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """New lines in place of lines [start, stop) of a file, counted from 0."""

    start: int
    stop: int
    lines: list[str]


def files() -> Iterator[tuple[Path, str, str]]:
    """Yield each file with its text, and the text that it should have."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILLED}
    wanted = dict(texts)
    for path in (FUNCTIONAL, KEYWORDS):  # the fields, which the others take their texts from
        wanted[path] = edited(wanted[path], of_fields(wanted[path], of_library(wanted[FUNCTIONAL])))
    known = keywords(wanted[KEYWORDS])
    texts_of_options = known["OfForward"] | of_library(wanted[FUNCTIONAL])
    for path in FILLED:
        wanted[path] = edited(wanted[path], of_functions(path, wanted[path], known))
        wanted[path] = edited(wanted[path], of_options(wanted[path], texts_of_options))
    classes = {name: node for text in wanted.values() for name, node in documented(text) if "." in name}
    for path in FILLED:
        here = {name: node for name, node in documented(wanted[path]) if "." not in name}
        sync = {name: node for name, node in (classes | here).items() if not is_overload(node)}
        wanted[path] = edited(wanted[path], of_twins(wanted[path], sync))
    for path in FILLED:
        yield path, texts[path], wanted[path]


def of_library(text: str) -> dict[str, str]:
    """Return the text of each parameter of the library's `attention`, with its default."""
    function = next(node for name, node in documented(text) if name == "attention" and not is_overload(node))
    arguments = function.args
    defaults = {
        each.arg: ast.unparse(default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None and ast.unparse(default) != "None"
    }
    entries = Docstring(doc(function)).entries
    return {name: with_default(said, defaults.get(name)) for name, said in entries.items()}


def with_default(text: str, default: str | None) -> str:
    return text if default is None else f"{text} Default: {default.replace(chr(39), chr(34))}."


def keywords(text: str) -> dict[str, dict[str, str]]:
    """Return the fields of each TypedDict of a file: those of the class itself first, then those of its bases."""
    classes: dict[str, dict[str, str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            own = {name: said for name, _, said, _ in fields(node)}
            for base in node.bases:
                own |= {n: f for n, f in classes.get(ast.unparse(base), {}).items() if n not in own}
            classes[node.name] = own
    return classes


def fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign, str, ast.Expr | None]]:
    """Yield the name, the definition, the docstring and its statement of each field of a class."""
    for each, after in zip_longest(node.body, node.body[1:]):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            said = after if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            text = "" if said is None else " ".join(str(said.value.value).split())  # type: ignore[attr-defined]
            yield each.target.id, each, text, said


def of_fields(text: str, said: dict[str, str]) -> Iterator[Edit]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in FROM_LIBRARY:
            for name, definition, _, old in fields(node):
                if name in said:
                    end = (old or definition).end_lineno
                    yield Edit(definition.end_lineno or 0, end or 0, quoted(textwrap.wrap(said[name], WIDTH - 7), 4))


def of_functions(path: Path, text: str, known: dict[str, dict[str, str]]) -> Iterator[Edit]:
    for name, node in documented(text):
        taken = unpacked(node)
        given = known.get(taken, {})
        shared = [each.arg for each in node.args.kwonlyargs] if (path, name) in SHARED else []
        own = {name: known["Forward"][name] for name in shared if name in known["Forward"]}
        if (own or given) and not is_overload(node):
            yield docstring_edit(node, Docstring(doc(node)).filled(own, given))


def of_twins(text: str, by_name: dict[str, Function]) -> Iterator[Edit]:
    for name, node in documented(text):
        first, _, last = name.rpartition(".")
        sync = f"{first.removeprefix('Async')}.{last}" if first else last.removeprefix("async_")
        is_twin = first.startswith("Async") if first else last.startswith("async_")
        if is_twin and sync in by_name and not is_overload(node):
            yield docstring_edit(node, doc(by_name[sync]))


def of_options(text: str, said: dict[str, str]) -> Iterator[Edit]:
    """Fill the docstrings of the classes of options: `Options` has the fields, `AttentionOptions` is made of it."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in ("Options", "AttentionOptions"):
            given = {name: said[name] for name in OPTIONS}
            yield docstring_edit(node, Docstring(doc(node)).filled(given))


def documented(text: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods that have a docstring, and overloads, by their qualified names."""
    tree = ast.parse(text)
    owners = [("", tree.body), *((f"{c.name}.", c.body) for c in tree.body if isinstance(c, ast.ClassDef))]
    for owner, body in owners:
        for node in body:
            if isinstance(node, Function) and ast.get_docstring(node) is not None:
                yield owner + node.name, node


def is_overload(node: Function) -> bool:
    return any("overload" in ast.unparse(each) for each in node.decorator_list)


def unpacked(node: Function) -> str:
    """Return the name of the TypedDict that a function unpacks into its keywords, or nothing."""
    annotation = node.args.kwarg.annotation if node.args.kwarg else None
    found = re.fullmatch(r"Unpack\[(?:\w+\.)*(\w+)\]", ast.unparse(annotation)) if annotation else None
    return found[1] if found else ""


def doc(node: Function | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


class Docstring:
    """A docstring in three: the text before the parameters, their entries that are kept, and the sections behind."""

    def __init__(self, text: str) -> None:
        parts = re.split(f"\n\n(?=(?:{'|'.join(HEADINGS)})\n)", text)
        sections = {part.partition("\n")[0]: part for part in parts[1:]}
        self.before = parts[0]
        self.behind = [part for heading, part in sections.items() if heading not in HEADINGS[:2]]
        self.entries: dict[str, str] = {}
        inner = sections.get("Args:", "").partition("\n")[2]
        starts = list(ENTRY.finditer(inner))
        for start, after in zip_longest(starts, starts[1:]):
            said = inner[start.end() : after.start() if after else len(inner)]
            self.entries[start[1]] = " ".join(said.split())

    def filled(self, own: dict[str, str], keywords: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the docstring with the entries of its `own` parameters, and those of its keywords."""
        sections = [self.before]
        for heading, entries in zip(HEADINGS, (self.entries | own, keywords), strict=False):
            if entries:
                sections.append("\n".join([heading, *(line for each in entries.items() for line in entry(*each))]))
        return "\n\n".join([*sections, *self.behind])


def entry(name: str, said: str) -> list[str]:
    width = WIDTH - 8  # of a method, which is indented twice; a function's lines may be shorter than they could be
    return textwrap.wrap(f"    {name}: {said}", width, subsequent_indent=" " * 8, break_on_hyphens=False)


def docstring_edit(node: Function | ast.ClassDef, text: str) -> Edit:
    old = node.body[0]
    return Edit(old.lineno - 1, old.end_lineno or 0, quoted(text.split("\n"), old.col_offset))


def quoted(lines: list[str], indent: int) -> list[str]:
    """Return the lines of a docstring, as the formatter would have them."""
    space = " " * indent
    if len(lines) == 1 and len(lines[0]) + indent + 6 <= WIDTH:
        return [f'{space}"""{lines[0]}"""']
    first = f'{space}"""{lines[0]}'
    return [first, *(f"{space}{line}".rstrip() for line in lines[1:]), f'{space}"""']


def edited(text: str, edits: Iterator[Edit]) -> str:
    lines = text.split("\n")
    for edit in sorted(edits, reverse=True):
        lines[edit.start : edit.stop] = edit.lines
    return "\n".join(lines)
