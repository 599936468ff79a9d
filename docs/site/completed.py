"""An extension of Griffe for the site. It adds docstrings and methods that exist only after an import.

Decorators add entries to docstrings at import. Asyncio classes get methods from their blocking counterparts at import.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_TWIN = re.compile(r"asynchronous\((\w+)\.(\w+)\)")


class Completed(griffe.Extension):
    """Replaces each docstring that a decorator completes by the complete one of the imported object.

    An asyncio class defines some methods as `name = asynchronous(Class.method)`. Each gets the signature and docstring
    of that blocking method.
    """

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        self._complete(func)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        self._complete(cls)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in self._modules(pkg):
            for cls in module.classes.values():
                for member in [] if cls.is_alias else [*cls.members.values()]:
                    if isinstance(member, griffe.Attribute) and (found := _TWIN.fullmatch(str(member.value))):
                        self._twin(cls, member.name, module[found[1]][found[2]])

    def _modules(self, module: griffe.Module) -> list[griffe.Module]:
        return [module, *(one for each in module.modules.values() if not each.is_alias for one in self._modules(each))]

    def _twin(self, cls: griffe.Class, name: str, sync: griffe.Function) -> None:
        made = griffe.Function(
            name, parameters=sync.parameters, returns=sync.returns, docstring=sync.docstring, lineno=sync.lineno,
        )  # fmt: skip
        made.overloads, made.labels = sync.overloads, {*sync.labels, "async"}
        cls.set_member(name, made)

    def _complete(self, found: griffe.Object) -> None:
        completing = ("flashpoint_contract.wording.docstrings.", "flashpoint._calls.keywords.call")
        if found.docstring is not None and any(path.startswith(completing) for path in found.module.imports.values()):
            found.docstring.value = inspect.cleandoc(griffe.dynamic_import(found.path).__doc__ or "")
