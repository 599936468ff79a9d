"""A fake device for rehearsals of `make gpu`: real kernels under Triton's interpreter, made-up times.

Every time that it "measures" is a function of the measured case. It records each start and end of a measurement in the
file NOTES, so that a test knows the measurements even if their process failed.

    python -m tests.support.gpu_stand_in NOTES [arguments of benchmarks/gpu.py]

runs the whole command of `make gpu` on the fake device.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.gpu_day import plan
from benchmarks.gpu_day.device import Cuda
from flashpoint_kernels.timing.case import ROW_FIELDS, Case, grid
from tests.support.kernels import fast_interpreter, gluon_interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    gluon_interpreter.install()
    fast_interpreter.install()

NAME = "made up: no device"
CLOCKS = "import time\nwhile True:\n    print('1980, 3201, 45, 600.5', flush=True)\n    time.sleep(0.05)\n"


def papers() -> list[Case]:
    shape = {"batch": 1, "q_heads": 2, "q_len": 16, "head_dim": 16}
    return grid([shape], directions=plan.PASSES, backends=("naive", "triton", "sdpa_flash"))


FEW = ("triton_backend/kernels/test_tiles.py",)  # kernel tests that take only seconds


class StandIn(Cuda):
    """The CPU, presented as an sm_90."""

    name = "cpu"
    processes = 2
    clocks = (sys.executable, "-c", CLOCKS)
    sizes = plan.Sizes(
        tokens=32, width=32, dims=(16,), seqs=(16, 32), first=(16, 32), sweep=32, math=16, smoke=(20, 33, 99, 16),
        repeats=2, decode=((2, 40),), decode_heads=((4, 2),), pages=(16,), papers=papers,
    )  # fmt: skip
    suites = {  # noqa: RUF012
        "tests": (
            plan.Suite("hopper", ("timing/test_case.py",), {"FLASHPOINT_HOPPER": "1"}),
            plan.Suite("general", FEW, {"FLASHPOINT_HOPPER": "0"}),
        ),
        "judge": (plan.Suite("judge", ("timing/test_case.py",), {"FLASHPOINT_HOPPER": "0"}),),
        "races": (plan.Suite("hopper_races_forward", FEW, {"FLASHPOINT_HOPPER": "1"}),),
    }

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def environment(self) -> dict[str, str]:
        return super().environment() | {"TRITON_INTERPRET": "1"}

    def describe(self) -> dict[str, Any]:
        import torch
        import triton

        return {
            "device": NAME, "capability": "9.0", "driver": "0", "cuda": None, "torch": torch.__version__,
            "triton": triton.__version__, "python": sys.version.split()[0],
            "checks": ["forward", "backward_q_hopper", "nano"],
            "absent": ["flash_attn", "flash_attn_3", "flashinfer", "xformers"],
        }  # fmt: skip

    def measure_peaks(self, dtype: str) -> None:
        pass

    def measure(self, case: Case) -> dict[str, Any]:
        """Return a made-up row; if the case's backend is triton, run the kernels on one head of the case first."""
        hopper = os.environ.get("FLASHPOINT_HOPPER") == "1"
        stored, two_sets = (os.environ.get(f"FLASHPOINT_{name}") == "1" for name in ("STORE_DS", "TWO_SETS"))
        what = plan.Timed(case, _deterministic(), hopper, stored, two_sets).key
        self.note("begin", what)
        row = dict.fromkeys(ROW_FIELDS) | {name: getattr(case, name) for name in ROW_FIELDS if hasattr(case, name)}
        if case.backend in ("flash_attn", "flash_attn_3", "flashinfer", "xformers"):
            row["skipped"] = f"{case.backend} is not installed"
        else:
            if case.backend == "triton":
                _run(case)
            ms = made_up(what)
            row |= {"ms": ms, "tflops_standard": 1 / ms, "device": NAME, "version": "0", "peak_bytes": 1 << 20}
        self.note("end", what)
        return row

    def milliseconds(self, call: Callable[[], Any], repeats: int = 20) -> list[float]:
        """Run the call once, and return a time of 1 ms for each repeat."""
        call()
        return [1.0] * repeats

    def occupancy(self, call: Any) -> dict[str, Any]:
        return {"registers": 255, "spills": 0, "shared_bytes": 1024, "programs_per_multiprocessor": 2}

    def note(self, what: str, of: str) -> None:
        """Append a line to the file of notes, and flush it to disk, so that it survives a crash."""
        file = os.open(self.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{what} {of}\n".encode())
        os.fsync(file)
        os.close(file)


class Unruly(StandIn):
    """A device on which cases of some lengths fail, each in another way."""

    CRASHES, HANGS, LOSES, RAISES = 101, 102, 103, 104
    gone = False

    def is_lost(self) -> bool:
        return self.gone

    def measure(self, case: Case) -> dict[str, Any]:
        if case.q_len == self.CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if case.q_len == self.HANGS:
            time.sleep(3600)
        self.gone |= case.q_len == self.LOSES
        if self.gone:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if case.q_len == self.RAISES:
            raise ValueError("no tile")
        return super().measure(case)


def made_up(what: str) -> float:
    """Return milliseconds from 1 to 2, always the same for the same text."""
    return 1 + zlib.crc32(what.encode()) % 1000 / 1000


def _deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()


def _run(case: Case) -> None:
    import torch

    from flashpoint_kernels import attention

    q = torch.randn(1, 1, case.q_len, case.head_dim, requires_grad=case.direction != "forward")
    k = torch.randn(1, 1, case.kv_len, case.head_dim)
    o = attention(q.half(), k.half(), k.half(), causal=case.causal, backend="triton")
    if case.direction != "forward":
        o.sum().backward()


if __name__ == "__main__":
    # Use the class of the imported module, not that of `__main__`: child processes unpickle it by its module's name.
    from tests.support import gpu_stand_in

    sys.exit(gpu.main(sys.argv[2:], gpu_stand_in.StandIn(Path(sys.argv[1]))))
