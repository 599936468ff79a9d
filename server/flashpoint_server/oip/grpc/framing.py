"""Take tensors out of a protobuf message, and put them into one, without the protobuf library, which copies them twice.

On the wire a message is a sequence of fields: number, kind (wire type) and value. A tensor's bytes follow their length.
So they can be read in place in the received message, and sent from the memory in which the engine computed them.
"""

from __future__ import annotations

from flashpoint_contract.wire import TENSOR_LIMIT, WireError

_BYTES = 2  # the wire type of a value with a length before it; type 0 is a varint, 1 is 8 bytes, 5 is 4 bytes
MOST_FIELDS = 8 * TENSOR_LIMIT  # maximum top-level fields of a valid request: inputs, outputs, tensors, parameters
_LONGEST = 10  # maximum bytes of a 64-bit varint


def split(message: bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Return a message without the fields that have this number, and the values of these fields. Raises WireError."""
    view, tensor = memoryview(message), number << 3 | _BYTES
    rest: list[memoryview] = []
    values: list[memoryview] = []
    at = begun = 0
    for _ in range(MOST_FIELDS):
        if at == len(view):
            return b"".join([*rest, view[begun:]]), values
        tag, start = _varint(view, at)
        match tag & 7:
            case 0:
                _, end = _varint(view, start)
            case 1:
                end = start + 8
            case 2:
                size, start = _varint(view, start)
                end = start + size
            case 5:
                end = start + 4
            case kind:
                raise WireError(f"the message has a field of kind {kind}")
        if end > len(view):
            raise WireError("the message ends inside a field")
        if tag == tensor:
            values.append(view[start:end])
            rest.append(view[begun:at])
            begun = end
        at = end
    raise WireError(f"the message has more than {MOST_FIELDS} fields")


def before(number: int, size: int) -> bytes:
    """Return the tag and the length before the `size` bytes of the field `number`."""
    return _number(number << 3 | _BYTES) + _number(size)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a varint, and the position after it. A varint has seven bits in each byte, the lowest first."""
    value = 0
    for place, byte in enumerate(view[at : at + _LONGEST]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise WireError("the message ends inside a number")


def _number(value: int) -> bytes:
    text = bytearray()
    while value > 127:
        text.append(value & 127 | 128)
        value >>= 7
    return bytes([*text, value])
