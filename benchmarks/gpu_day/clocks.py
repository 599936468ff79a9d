"""Clock rates, temperature and power of the GPU while a task runs, from nvidia-smi."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Sequence
from threading import Thread
from time import monotonic
from typing import Any

FIELDS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "temperature.gpu": "celsius", "power.draw": "watts"}
NVIDIA_SMI = (
    "nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", "500",
)  # fmt: skip
_KEPT = 1200  # samples: ten minutes


class Clocks:
    """Collects samples in the background. Without the command there are none."""

    def __init__(self, command: Sequence[str]) -> None:
        self._samples: deque[tuple[float, list[float]]] = deque(maxlen=_KEPT)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        Thread(target=self._read, name="clocks", daemon=True).start()

    def since(self, begin: float) -> dict[str, list[float]]:
        """Return [least, most] of each field since `begin` (time.monotonic); without newer samples, of the last one."""
        samples = list(self._samples)
        recent = [values for at, values in samples if at >= begin] or [values for _, values in samples[-1:]]
        if not recent:
            return {}
        columns = zip(*recent, strict=True)
        return {name: [min(column), max(column)] for name, column in zip(FIELDS.values(), columns, strict=True)}

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        pipe: Any = self._process.stdout
        for line in pipe:
            values = [_number(text) for text in line.split(",")]
            if len(values) == len(FIELDS):
                self._samples.append((monotonic(), values))
        pipe.close()


def _number(text: str) -> float:
    """Return a number, or -1 for a value that the device does not report."""
    try:
        return float(text)
    except ValueError:
        return -1.0
