"""Note which kernels Triton compiles, and which it finds in its cache: TRITON_CACHE_MANAGER names `Counted`.

Each kernel that a process needs is a line of the file in NOTES: its name, its key, and whether it was compiled. A
process notes a kernel once, at its first launch. `cache.counts` reads the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

from triton.runtime.cache import FileCacheManager

from benchmarks.gpu_day.cache import NOTES


class Counted(FileCacheManager):  # type: ignore[misc]
    """Triton's cache on disk, which notes each group of files that it finds or writes: one for each kernel."""

    def get_group(self, filename: str) -> Any:
        found = super().get_group(filename)
        if found:
            _note(filename, self.key, compiled=False)
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        _note(filename, self.key, compiled=True)
        return super().put_group(filename, group)


def _note(filename: str, key: str, compiled: bool) -> None:
    line = json.dumps({"kernel": filename.removesuffix(".json"), "key": key, "compiled": compiled})
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)
