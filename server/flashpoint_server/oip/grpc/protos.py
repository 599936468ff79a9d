"""The messages of the .proto files beside this, in a pool of their own.

Code that a compiler of such files generates goes into the process's one default pool, where a name has one definition:
a program that also loads NVIDIA's client has another `inference` there. So the files are read here: proto3's messages,
enumerations, maps, choices of one, and the services that name them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_TOKEN = re.compile(r'//.*|"[^"]*"|[\w.]+|[^\w\s]')
_SCALARS = {name.removeprefix("TYPE_").lower(): number for name, number in FieldDescriptorProto.Type.items()}
_POOL = DescriptorPool()


class _Reader:
    """The rest of a file, token by token."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = [token for token in _TOKEN.findall(text) if not token.startswith("//")][::-1]

    def file(self, file: Any) -> None:
        file.syntax = "proto3"
        while self._tokens:
            match word := self._next():
                case "package":
                    (file.package,) = self._until(";")
                case "message":
                    self._message(file.message_type.add(name=self._next()))
                case "enum":
                    self._enum(file.enum_type.add(name=self._next()))
                case "service":
                    self._service(file.service.add(name=self._next()))
                case _:
                    assert [word, *self._until(";")] == ["syntax", "=", '"proto3"']

    def _next(self) -> str:
        return self._tokens.pop()

    def _until(self, end: str) -> list[str]:
        """The tokens up to `end`, which is taken, too."""
        found = []
        while (token := self._next()) != end:
            found.append(token)
        return found

    def _message(self, message: Any) -> None:
        self._until("{")
        while (word := self._next()) != "}":
            match word:
                case "message":
                    self._message(message.nested_type.add(name=self._next()))
                case "enum":
                    self._enum(message.enum_type.add(name=self._next()))
                case "oneof":
                    message.oneof_decl.add(name=self._next())
                    self._until("{")
                    while (kind := self._next()) != "}":
                        self._field(message.field.add(oneof_index=len(message.oneof_decl) - 1), kind)
                case "map":
                    self._map(message)
                case "repeated":
                    self._field(message.field.add(label=FieldDescriptorProto.LABEL_REPEATED), self._next())
                case _:
                    self._field(message.field.add(), word)

    def _map(self, message: Any) -> None:
        """A map is a repeated message of a key and a value."""
        _, key, _, value, _, name, _, number, _ = [self._next() for _ in range(9)]
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        for place, (part, kind) in enumerate({"key": key, "value": value}.items(), 1):
            _typed(entry.field.add(name=part, number=place), kind)
        repeated = FieldDescriptorProto.LABEL_REPEATED
        _typed(message.field.add(name=name, number=int(number), label=repeated), entry.name)

    def _field(self, field: Any, kind: str) -> None:
        field.name, _, number = self._until(";")
        field.number = int(number)
        _typed(field, kind)

    def _enum(self, enum: Any) -> None:
        self._until("{")
        while (name := self._next()) != "}":
            _, number = self._until(";")
            enum.value.add(name=name, number=int(number))

    def _service(self, service: Any) -> None:
        self._until("{")
        while self._next() != "}":
            name, _, asked, _, _, _, answered, _ = self._until(";")
            service.method.add(name=name, input_type=asked, output_type=answered)


def _typed(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind
    if not field.HasField("label"):
        field.label = FieldDescriptorProto.LABEL_OPTIONAL


def _load(name: str) -> None:
    file = FileDescriptorProto(name=name)
    _Reader((Path(__file__).parent / name).read_text(encoding="utf-8")).file(file)
    _POOL.Add(file)


def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return GetMessageClass(_POOL.FindMessageTypeByName(name))


def methods(service: str) -> dict[str, tuple[Any, Any]]:
    """The classes of what each method of a service takes and gives."""
    found = _POOL.FindServiceByName(service).methods
    return {method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type)) for method in found}


_load("inference.proto")
_load("health.proto")
