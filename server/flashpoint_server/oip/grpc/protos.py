"""The messages and services of inference.proto and health.proto, in a descriptor pool of their own.

The code that protoc generates uses the default pool of the process, where a name has one definition: a program that
also loads NVIDIA's client has another `inference` there. So `make protos` compiles the files to a descriptor set, and
this module makes the classes from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("descriptors.binpb").read_bytes()).file:
    _POOL.Add(_file)


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return GetMessageClass(_POOL.FindMessageTypeByName(name))


def methods(service: str) -> dict[str, tuple[Any, Any]]:
    """Return the classes of what each method of a service takes and gives."""
    found = _POOL.FindServiceByName(service).methods
    return {method.name: (GetMessageClass(method.input_type), GetMessageClass(method.output_type)) for method in found}
