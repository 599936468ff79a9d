"""Fill one call of a lent GPU, what matters most first: `make gpu-call OUT=DIR WHEELS=wheels`.

    wheels    install the packages of the service, and say their versions
    service   prove the service: benchmarks/gpu_day/service.py
    kernels   a smoke test of each kernel, then the decisive points beside SDPA: `gpu.py first`
    rest      the kernel tests, then the whole table: `gpu.py tests table`

--compiled has kernels that `make gpu-compiled` has compiled: Triton compiles only the others. Each part is a process
of its own with a limit in seconds, and is killed when it passes it. All parts end within --seconds. Each writes its
rows at once; OUT/call.jsonl has a line for each part, with the number of kernels that it compiled and that it found
compiled, OUT/PART.kernels.jsonl their names, OUT/PART.log its output. All parts use one folder of compiled kernels.
Exit codes: 0, each part ended with 0; 1, a part failed or did not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day import cache as kernels  # noqa: E402
from benchmarks.gpu_day import checkout  # noqa: E402

FILE = "call.jsonl"
SECONDS = 570.0
_SAVED = 15.0  # seconds that gpu.py may need after its own limit, for the report and the packed kernels
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL


class Part(NamedTuple):
    """A part of the call: its most seconds, and the arguments of Python."""

    name: str
    seconds: float
    command: Sequence[str]


def parts(out: Path, wheels: Path | None, installed: Path, cache: Path, device: str, commit: str) -> list[Part]:
    """Return the parts in their order. `{seconds}` and `{minutes}` become their limits."""
    measured = ["benchmarks/gpu.py", "--out", str(out), "--cache", str(cache), "--commit", commit]
    install = ["benchmarks/gpu_serve.py", "--wheels", str(wheels), "--install", str(installed)]
    service = ["-m", "benchmarks.gpu_day.service", str(out), "--device", device]
    return [
        *([Part("wheels", 40, install)] if wheels else []),
        Part("service", 150, [*service, "--seconds", "{seconds}"]),
        Part("kernels", 240, [*measured, "first", "--minutes", "{minutes}"]),
        Part("rest", SECONDS, [*measured, "tests", "table", "--minutes", "{minutes}"]),
    ]


def call(todo: Iterable[Part], out: Path, seconds: float, variables: dict[str, str]) -> bool:
    """Run the parts one after another, each within its limit and all within `seconds`. Return whether all are right."""
    end, right = time.monotonic() + seconds, True
    with (out / FILE).open("a") as record:
        for part in todo:
            began = time.monotonic()
            limit = min(part.seconds, end - began)
            code = _run(part, limit, out, variables) if limit > _SAVED else None
            row = {"part": part.name, "code": code, "limit": round(limit, 1)}
            row |= {"seconds": round(time.monotonic() - began, 1)} | kernels.counts(_notes(out, part))
            line = json.dumps(row)
            print(line, flush=True)
            record.write(line + "\n")
            record.flush()
            right &= code == 0
    return right


def _notes(out: Path, part: Part) -> Path:
    """Return the file of the kernels that a part needs: see counted.py."""
    return out / f"{part.name}.kernels.jsonl"


def _run(part: Part, limit: float, out: Path, variables: dict[str, str]) -> int | None:
    """Return the exit code of a part; None if it passed its limit and was killed with its child processes."""
    own = limit - _SAVED
    command = [text.format(seconds=own, minutes=own / 60) for text in part.command]
    with (out / f"{part.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=variables | {kernels.NOTES: str(_notes(out, part)), "TRITON_CACHE_MANAGER": kernels.MANAGER},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(limit - _GRACE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, help="folder of `make gpu-wheels`, where packages are missing")
    parser.add_argument("--compiled", type=Path, help="folder of `make gpu-compiled`")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--device", default="cuda", help="device of the service: cpu for a rehearsal")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "flashpoint-gpu-cache")
    parser.add_argument("--commit", default="unknown", help="the commit that runs, where git is missing")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    out, cache = args.out.resolve(), args.cache.resolve()
    if args.compiled:
        print(f"{kernels.unpack(args.compiled, cache)} compiled kernels brought from {args.compiled}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        installed = Path(folder) / "installed"
        path = checkout.python_path(str(installed), checkout.pretend_installed(Path(folder) / "described", "0"))
        variables = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        todo = parts(out, args.wheels and args.wheels.resolve(), installed, cache, args.device, args.commit)
        return 0 if call(todo, out, args.seconds, variables) else 1


if __name__ == "__main__":
    sys.exit(main())
