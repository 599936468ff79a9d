"""Fuzz one target, led by coverage: `python -m tests.fuzz.hunt TARGET [what libFuzzer takes]`.

Needs atheris. Inputs that reach something new are kept in the first folder that is named; `make fuzz` calls this for
each target, through run.py.
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

HANG = 60  # seconds, on a machine that does other things, too


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    flags = [f"-max_len={LONGEST}", f"-timeout={HANG}", "-rss_limit_mb=1024", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, *sys.argv[1:]], partial(_try, target), custom_mutator=_change)
    atheris.Fuzz()


def _try(target: Callable[[bytes], None], data: bytes) -> None:
    """Where memory is counted an input takes four times as long: one of sixteen pays that, the same ones each time."""
    if zlib.crc32(data) % 16:
        target(data)  # libFuzzer looks at its time
    else:
        bounded(target, data)


def _change(data: bytes, longest: int, seed: int) -> bytes:
    """Half of the time as JSON, if it is that; else as bytes."""
    changed = mutated(data, Random(seed)) if seed % 2 else None
    return changed[:longest] if changed else atheris.Mutate(data, longest)


if __name__ == "__main__":
    main()
