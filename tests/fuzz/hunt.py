"""Fuzz one target, guided by coverage: `python -m tests.fuzz.hunt TARGET [arguments of libFuzzer]`.

Needs atheris. libFuzzer stores inputs that reach new code in the first folder among its arguments. `make fuzz` runs
this module for each target through run.py.
"""

import sys
import zlib
from collections.abc import Callable
from functools import partial
from random import Random

import atheris

from tests.fuzz.mutate import mutated

with atheris.instrument_imports(include=["flashpoint", "flashpoint_server", "flashpoint_kernels"]):
    from tests.fuzz.targets import LONGEST, TARGETS, bounded

HANG = 60  # libFuzzer's time limit for an input, in seconds: long, because the machine may be busy


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    flags = [f"-max_len={LONGEST}", f"-timeout={HANG}", "-rss_limit_mb=1024", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, *sys.argv[1:]], partial(_try, target), custom_mutator=_change)
    atheris.Fuzz()


def _try(target: Callable[[bytes], None], data: bytes) -> None:
    """Run a target. Limit memory, too, for one input in 16, chosen by checksum: this takes four times as long."""
    if zlib.crc32(data) % 16:
        target(data)  # libFuzzer limits its time
    else:
        bounded(target, data)


def _change(data: bytes, longest: int, seed: int) -> bytes:
    """Return a mutated input, for libFuzzer. JSON is changed as JSON if `seed` is odd; all else is changed as bytes."""
    changed = mutated(data, Random(seed)) if seed % 2 else None
    return changed[:longest] if changed else atheris.Mutate(data, longest)


if __name__ == "__main__":
    main()
