"""Values of metrics in the memory that the HTTP processes of a server share (ipc/memory.py).

prometheus_client has files on a disk for this, one set for each process that ever ran, which grow without a check for
room. Here a process continues with the counts of the former process of its number. Its values lie in chunks, one after
the other: the length of the key, the value, its time, and the key. The first number of a chunk is its used bytes; it
changes last, so that readers see only whole entries.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import structlog
from prometheus_client import Metric, values
from prometheus_client.mmap_dict import mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from flashpoint_server.ipc.memory import NamedMemory

CHUNK = 1 << 16
_BLOCK = "metrics"  # the start of the names of these blocks: metrics/KIND/PROCESS/NUMBER
_USED = struct.Struct("=Q")
_PAIR = struct.Struct("=dd")
_ENTRY = struct.Struct("=Qdd")  # bytes of the key, the value and its time

log = structlog.stdlib.get_logger("flashpoint.metrics")


class _Values:
    """The values of one process and one kind of metric: a type, for gauges with the rule that joins processes."""

    def __init__(self, memory: NamedMemory, kind: str, process: int) -> None:
        self._memory = memory
        self._prefix = f"{_BLOCK}/{kind}/{process}"
        self._places: dict[str, tuple[mmap.mmap, int]] = {}
        self._chunks: list[mmap.mmap] = []
        self._full = False
        for number in count():
            if (name := f"{self._prefix}/{number}") not in memory.names():
                break
            self._chunks.append(chunk := memory.block(name, CHUNK)[0])
            if kind.startswith("gauge_live"):
                _USED.pack_into(chunk, 0, 0)
            self._places |= {key: (chunk, at) for key, _, _, at in _entries(chunk)}

    def place(self, key: str) -> tuple[mmap.mmap | bytearray, int]:
        """Return the chunk of a value and its position there. Without memory for it, it is not counted."""
        if key not in self._places:
            try:
                self._places[key] = self._append(key.encode())
            except OSError as error:
                if not self._full:
                    self._full = True
                    log.error("new metrics are not counted", error=str(error), advice="raise the limit of memory")
                return bytearray(_ENTRY.size), 0
        return self._places[key]

    def _append(self, text: bytes) -> tuple[mmap.mmap, int]:
        size = _ENTRY.size + -(-len(text) // 8) * 8
        used = max(_USED.unpack_from(self._chunks[-1])[0], _USED.size) if self._chunks else CHUNK
        if used + size > CHUNK:
            self._chunks.append(self._memory.block(f"{self._prefix}/{len(self._chunks)}", CHUNK)[0])
            used = _USED.size
        chunk = self._chunks[-1]
        _ENTRY.pack_into(chunk, used, len(text), 0.0, 0.0)
        chunk[used + _ENTRY.size : used + _ENTRY.size + len(text)] = text
        _USED.pack_into(chunk, 0, used + size)
        return chunk, used


def _entries(chunk: mmap.mmap) -> Iterator[tuple[str, float, float, int]]:
    """Yield the key, value, time and position of each entry."""
    (used,), at = _USED.unpack_from(chunk), _USED.size
    while at < used:
        length, value, time = _ENTRY.unpack_from(chunk, at)
        start = at + _ENTRY.size
        yield chunk[start : start + length].decode(), value, time, at
        at = start + -(-length // 8) * 8


def count_in(memory: NamedMemory, process: int) -> None:
    """Let all metrics that are made from now on count in `memory`, as those of HTTP process number `process`."""
    kinds: dict[str, _Values] = {}

    class SharedValue:
        """A number, with the methods that prometheus_client calls."""

        _multiprocess = True

        def __init__(
            self, typ: str, metric: str, name: str, labels: Any, label_values: Any, help_: str,
            multiprocess_mode: str = "", **_: Any,
        ) -> None:  # fmt: skip
            kind = f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ
            if kind not in kinds:
                kinds[kind] = _Values(memory, kind, process)
            self._chunk, at = kinds[kind].place(mmap_key(metric, name, labels, label_values, help_))
            self._at = at + 8

        def inc(self, amount: float) -> None:
            self.set(self.get() + amount)

        def set(self, value: float, timestamp: float | None = None) -> None:
            self._chunk[self._at : self._at + 16] = _PAIR.pack(value, timestamp or 0.0)

        def get(self) -> float:
            value: float = _PAIR.unpack_from(self._chunk, self._at)[0]
            return value

        def set_exemplar(self, exemplar: Any) -> None:
            pass

        def get_exemplar(self) -> None:
            return None

    values.ValueClass = SharedValue


def forget(memory: NamedMemory, process: int) -> None:
    """Remove the values of a process that has ended which tell of its present state."""
    for name in memory.names():
        block, _, rest = name.partition("/")
        if block == _BLOCK and rest.startswith("gauge_live") and rest.split("/")[1] == str(process):
            _USED.pack_into(memory.block(name, CHUNK)[0], 0, 0)


class SharedCollector(Collector):
    """Collects the values of all processes in a memory."""

    def __init__(self, memory: NamedMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        metrics: dict[str, Metric] = {}
        for block in self._memory.names():
            if not block.startswith(f"{_BLOCK}/"):
                continue
            _, kind, process, _ = block.split("/")
            typ, _, mode = kind.partition("_")
            for key, value, time, _ in _entries(self._memory.block(block, CHUNK)[0]):
                metric_name, name, labels, help_ = json.loads(key)
                metric = metrics.setdefault(metric_name, Metric(metric_name, help_, typ))
                named = tuple(sorted(labels.items()))
                if typ == "gauge":
                    metric._multiprocess_mode = mode  # type: ignore[attr-defined]
                    metric.add_sample(name, (*named, ("pid", process)), value, time)  # type: ignore[arg-type]
                else:
                    metric.add_sample(name, named, value)  # type: ignore[arg-type]
        joined: Iterable[Metric] = MultiProcessCollector._accumulate_metrics(metrics, True)  # type: ignore[no-untyped-call]
        return joined
