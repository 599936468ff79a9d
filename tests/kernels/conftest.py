"""Triton's interpreter, quicker by a third: it puts its own functions into `triton.language` once for each process.

It does so again whenever one kernel calls another, and looks through all of the language to do it. Nothing compiles in
a process that interprets.
"""

from types import FunctionType
from typing import Any

import triton
from triton.runtime import interpreter

from tests.conftest import DEVICE

_replaced: dict[tuple[bool, bool], Any] = {}


def _replace_once(fn: FunctionType) -> Any:
    """As `_patch_lang`: what undoes the changes that it made, which are none where they are there already."""
    names = fn.__globals__.values()
    seen = any(value is interpreter.tl for value in names), any(value is interpreter.tl.core for value in names)
    if seen not in _replaced:
        _replaced[seen] = _replace(fn)
    return type(_replaced[seen])()


if DEVICE == "cpu" and triton.__version__.startswith("3.7."):  # other versions (`make compat`) may do it otherwise
    _replace = interpreter._patch_lang
    interpreter._patch_lang = _replace_once
