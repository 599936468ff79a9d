"""The instructions of a compiled kernel (SASS, as printed by nvdisasm): its loops and their kinds of instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

MMA = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")
# Kinds of instructions, by the beginning of their names; the first match counts.
KINDS = {
    "matrix": MMA,
    "exponential": re.compile(r"MUFU\.EX2"),
    "spilled": re.compile(r"LDL|STL"),
    "memory": re.compile(r"LD|ST|ATOM|RED|UTMA|UBLK|UTCCP|UTCATOM"),
    "convert": re.compile(r"F2|I2F|PRMT|UPRMT"),
    "move": re.compile(r"MOV|UMOV|IMAD\.MOV|R2UR|S2R|S2UR|CS2R|SHFL|REDUX|VOTE|P2R|R2P|PLOP3|UPLOP3"),
    "float": re.compile(r"MUFU|F|HADD|HMUL|HFMA|HMNMX"),
    "integer": re.compile(r"U?IADD|U?IMAD|U?LOP3|U?SHF|U?LEA|U?ISETP|U?SEL|U?IMNMX|VI|VOTEU|U?IABS|U?SGXT|U?BMSK|I"),
    "control": re.compile(r""),
}


class Code:
    """The instructions of a kernel."""

    def __init__(self, cubin: bytes) -> None:
        self.instructions: list[str] = []
        self._labels: dict[str, int] = {}
        for line in tool("nvdisasm", "-c", cubin).splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                self._labels[label[1]] = len(self.instructions)
            elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*)", line):
                self.instructions.append(found[1])

    def loops(self) -> list[list[str]]:
        """Return the innermost loops with a matrix product, in order: from the target of a backward branch to the
        branch.
        """
        spans = []
        for at, instruction in enumerate(self.instructions):
            jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
            start = self._labels.get(jump[1], at) if jump else at
            if start < at and any(MMA.search(i) for i in self.instructions[start:at]):
                spans.append((start, at + 1))
        inner = [(a, b) for a, b in spans if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)]
        return [self.instructions[a:b] for a, b in sorted(inner)]

    def shortest_loop(self) -> list[str]:
        """Return the shortest of `loops`, which has the fewest tests; empty if there is no loop."""
        return min(self.loops(), key=len, default=[])

    def beside(self) -> int:
        """Return the minimum of exponentials between a wait that leaves a product running and the wait for all; 0 if
        none.
        """
        counts = []
        stretch: list[str] | None = None
        for instruction in self.instructions:
            if wait := re.search(r"\bWARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", instruction):
                if wait[1] != "0":
                    stretch = stretch or []
                elif stretch is not None:
                    counts.append(sum("MUFU.EX2" in i for i in stretch))
                    stretch = None
            elif stretch is not None:
                stretch.append(instruction)
        return min(counts, default=0)


def kinds(instructions: list[str]) -> dict[str, int]:
    """Return the number of instructions of each kind in KINDS."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        name = re.sub(r"^@!?U?P\w+\s+", "", instruction)
        counts[next(kind for kind, begins in KINDS.items() if begins.match(name))] += 1
    return {kind: counts[kind] for kind in KINDS}


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, local bytes) of a thread, as cuobjdump reads them from the binary."""
    text = tool("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def tool(name: str, flag: str, cubin: bytes) -> str:
    """Return the output of one of Triton's packaged tools for a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True).stdout
