"""Move the service's wall clock by hours and days, forward and back: clock.c replaces functions of the C library."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path


class Clock:
    """A wall clock for all processes that have its `environment`; `move` changes its offset."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._file = folder / "moved"
        self._file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}
        self.moved = 0

    @classmethod
    def build(cls) -> Clock | None:
        """Compile clock.c, and return the clock; return None without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix="chaos-clock-"))
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        return cls(folder, library)

    def move(self, seconds: int) -> None:
        """Set the offset from the true time; it takes effect at once, because processes map the file that has it."""
        self.moved = seconds
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def discard(self) -> None:
        shutil.rmtree(self._file.parent)
