"""The process for JSON: `python -m flashpoint_server.formats.codec_process --socket FD --parent PID --name NAME`.

It makes the calls that codec.py sends on a stream socket, one after another, until the socket is closed. A message is a
pickle with out-of-band buffers (PEP 574), the arrays: their number, the size of the pickle, the size of each array, the
pickle, and the arrays. A call is (function, arguments); an answer is (whether the function returned, the value or the
exception).
"""

from __future__ import annotations

import argparse
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashpoint_server.observability.lines import take_stderr
from flashpoint_server.processes.parent import die_with_parent

HEAD = 16  # bytes of the first two numbers of a message: of arrays, and of the bytes of the pickle
_SIZE = 8  # bytes of the size of an array


def pack(message: Any) -> list[bytes | memoryview]:
    """Return the bytes of a message in the order of sending, without copying the memory of arrays."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(message, 5, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    sizes = [array.nbytes for array in arrays]
    return [struct.pack(f"<{2 + len(sizes)}Q", len(sizes), len(text), *sizes) + text, *arrays]


def size_of(head: memoryview) -> int:
    """Return the bytes between a message's first HEAD bytes, `head`, and its arrays."""
    count, size = struct.unpack("<2Q", head)
    return int(count * _SIZE + size)


def sizes_of(head: memoryview, middle: memoryview) -> tuple[int, ...]:
    """Return the sizes of a message's arrays. `middle` are the bytes before them."""
    count, _ = struct.unpack("<2Q", head)
    return struct.unpack_from(f"<{count}Q", middle)


def beside(value: Any) -> Any:
    """Return a text so that `pack` does not copy it. The receiver gets a memoryview."""
    return pickle.PickleBuffer(value) if isinstance(value, bytes | memoryview) else value


def unpack(middle: memoryview, arrays: Sequence[memoryview]) -> Any:
    return pickle.loads(middle[_SIZE * len(arrays) :], buffers=arrays)


def room(size: int) -> memoryview:
    """Return `size` bytes of uninitialised memory."""
    return np.empty(size, np.uint8).data


def _read(sock: socket.socket, size: int) -> memoryview:
    place, done = room(size), 0
    while done < size:
        if not (count := sock.recv_into(place[done:])):
            raise EOFError
        done += count
    return place


def _receive(sock: socket.socket) -> Any:
    head = _read(sock, HEAD)
    middle = _read(sock, size_of(head))
    return unpack(middle, [_read(sock, size) for size in sizes_of(head, middle)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--name", help="name of its work, for lists of processes")
    flags = parser.parse_args()
    die_with_parent(flags.parent)
    take_stderr()
    with socket.socket(fileno=flags.socket) as sock:
        while True:
            try:
                function, arguments = _receive(sock)
            except (EOFError, ConnectionError):
                return 0
            try:
                texts = (bytes(one) if isinstance(one, memoryview) else one for one in arguments)
                answer: tuple[bool, Any] = True, beside(function(*texts))
            except Exception as error:
                answer = False, error
            for piece in pack(answer):
                sock.sendall(piece)


if __name__ == "__main__":
    sys.exit(main())
