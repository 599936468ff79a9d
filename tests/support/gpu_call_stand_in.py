"""A rehearsal of `make gpu-call` on the fake device of gpu_stand_in.py; the service runs on the CPU.

python -m tests.support.gpu_call_stand_in NOTES [arguments of benchmarks/gpu_call.py]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from benchmarks import gpu_call

KERNELS = "benchmarks/gpu.py"


def main(notes: str, arguments: Sequence[str]) -> int:
    made = gpu_call.parts

    def parts(*of: Any) -> list[gpu_call.Part]:
        fake = ["-m", "tests.support.gpu_stand_in", notes]
        return [
            part._replace(command=[*fake, *part.command[1:]]) if part.command[0] == KERNELS else part
            for part in made(*of)
        ]

    with mock.patch.object(gpu_call, "parts", parts):
        return gpu_call.main([*arguments, "--device", "cpu"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
