"""The measured device (`Cuda`), and samples of its clock rates (`Clocks`).

Each process that `guard.Guard` starts gets a copy of the `Cuda` object. Tests replace this object with one that has
small shapes and returns fixed times.
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from time import monotonic
from typing import Any

from benchmarks.gpu_day import plan
from flashpoint_kernels.timing.case import TIMED, Case

Row = dict[str, Any]

REGISTERS = 65536  # registers of a multiprocessor, on every architecture since Kepler
FIELDS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "temperature.gpu": "celsius", "power.draw": "watts"}
NVIDIA_SMI = ("nvidia-smi", "-i", "0", "--format=csv,noheader,nounits")
SAMPLES = (*NVIDIA_SMI, f"--query-gpu={','.join(FIELDS)}", "-lms", "500")
_KEPT = 1200  # number of kept samples, for ten minutes


class Cuda:
    """The first CUDA device of this machine."""

    name = "cuda"
    sizes = plan.Sizes()
    suites = plan.SUITES
    processes = 12  # number of parallel processes that compile or test
    clocks: tuple[str, ...] = SAMPLES  # the command that `Clocks` reads

    def environment(self) -> dict[str, str]:
        """Return environment variables for all processes that use the device."""
        return {"FLASHPOINT_TEST_DEVICE": self.name}

    def describe(self) -> Row | None:
        """Return the device's name, capability, driver, versions and `absent` backends; None without a device."""
        import torch

        from flashpoint_kernels.timing.device import describe

        if not torch.cuda.is_available():
            return None
        return describe(self.name) | {"driver": driver(), "absent": absent()}

    def is_lost(self) -> bool:
        """Return whether the device has stopped working in this process."""
        from flashpoint_kernels.timing.device import is_lost

        return is_lost(self.name)

    def measure_peaks(self, dtype: str) -> None:
        """Measure the device's peak FLOP/s and bandwidth, which `measure` needs, once per process.

        Call it before torch's deterministic mode is on: cuBLAS fails in this mode.
        """
        from flashpoint_kernels.timing.clock import Slices
        from flashpoint_kernels.timing.device import find_peaks

        for _ in find_peaks(self.name, dtype, Slices(20)):
            pass

    def measure(self, case: Case) -> Row:
        """Time one case; return a row of `flashpoint_kernels.timing`. Raises DeviceLostError."""
        from flashpoint_kernels.timing import Timing, measure

        running = measure(case, self.name, Timing(max_seconds=0.3))
        try:
            while True:
                next(running)
        except StopIteration as end:
            return end.value

    def milliseconds(self, call: Callable[[], Any], repeats: int = 20) -> list[float]:
        """Return the milliseconds of each of `repeats` calls. Raises CannotRunError if they contain host time."""
        from flashpoint_kernels.timing.clock import clock_of
        from flashpoint_kernels.timing.implementations import CannotRunError

        clock = clock_of(self.name)
        taken = clock.time(call, repeats)
        if clock.with_host:
            raise CannotRunError("the call waits for the device, so its time would contain the host's time")
        return taken

    def occupancy(self, call: Any) -> Row:
        """Return the registers, spills and shared memory of a call's kernel, and its programs per multiprocessor."""
        import torch

        from flashpoint_kernels.triton_backend.tools.sass import resources

        compiled = call.warmup()
        registers, spilled = resources(compiled.asm["cubin"])
        properties = torch.cuda.get_device_properties(self.name)
        threads = 32 * compiled.metadata.num_warps
        shared = compiled.metadata.shared
        fitting = [
            REGISTERS // (max(registers, 1) * threads),
            properties.shared_memory_per_multiprocessor // max(shared + 1024, 1),  # CUDA reserves 1 KiB a program
            properties.max_threads_per_multi_processor // threads,
        ]
        sizes = {"registers": registers, "spills": spilled, "shared_bytes": shared}
        return sizes | {"programs_per_multiprocessor": min(fitting)}


def driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi fails."""
    try:
        command = [*NVIDIA_SMI, "--query-gpu=driver_version"]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def absent() -> list[str]:
    """Return the backends whose packages are not installed, and print the reasons to stderr."""
    from flashpoint_kernels.timing.implementations import IMPLEMENTATIONS, CannotRunError

    names = []
    for name in TIMED:
        try:
            IMPLEMENTATIONS[name].version()
        except CannotRunError as error:
            names.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    return names


class Clocks:
    """Samples clock rates, temperature and power in the background, if `command` can be started."""

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
        """Return [least, most] of each field in the samples since `begin` (time.monotonic), or in the last sample."""
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
