"""Rebuild the corpus from itself and the inputs that `make fuzz` has found: `python -m tests.fuzz.keep`.

The module reads inputs in order of size. It keeps an input if two lines of our code run one after the other for it,
and did not for any smaller input.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import flashpoint
import flashpoint_kernels
import flashpoint_server
from tests.fuzz.run import CORPUS, FOUND
from tests.fuzz.targets import TARGETS

OURS = tuple(str(Path(package.__file__).parent) for package in (flashpoint, flashpoint_kernels, flashpoint_server))


def ways(target: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    """Return (file, line, next line) of each step from line to line that `target` runs in our code on `data`."""
    steps_taken: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file, before = frame.f_code.co_filename, 0
        if not file.startswith(OURS):
            return None

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            steps_taken.add((file, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return steps_taken


def main() -> None:
    for name, target in TARGETS.items():
        paths = [p for folder in (CORPUS / name, FOUND / name) if folder.exists() for p in folder.iterdir()]
        inputs = sorted({path.read_bytes() for path in paths}, key=lambda data: (len(data), data))
        seen: set[tuple[str, int, int]] = set()
        kept_inputs = []
        for data in inputs:
            gone = ways(target, data)
            if not gone <= seen:
                seen |= gone
                kept_inputs.append(data)
        for path in (CORPUS / name).iterdir():
            path.unlink()
        for data in kept_inputs:
            (CORPUS / name / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)
        print(f"{name}: {len(kept_inputs)} of {len(inputs)} inputs, {sum(map(len, kept_inputs))} bytes")


if __name__ == "__main__":
    main()
