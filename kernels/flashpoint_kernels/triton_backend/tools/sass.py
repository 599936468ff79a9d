"""The instructions of a compiled kernel (SASS, from nvdisasm): loops, kinds of instructions, register hazards."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

from flashpoint_kernels.triton_backend.tools.ptx import innermost

MMA = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")
# Kinds of instructions, by the first letters of their names; the first match counts.
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


# Instructions of sm_90 that write no general register in their first operand.
_NO_RESULT = (
    "ST", "RED", "BRA", "BRX", "BAR", "SYNCS", "UTMA", "UBLK", "WARPGROUP", "WARP", "DEPBAR", "LDGDEPBAR", "LDGSTS",
    "ARRIVES", "EXIT", "RET", "CALL", "NOP", "BSYNC", "BSSY", "BREAK", "MEMBAR", "FENCE", "CCTL", "ERRBAR", "ELECT",
    "USETMAXREG", "NANOSLEEP", "YIELD", "R2P", "HGMMA",
)  # fmt: skip
_MOST_GROUPS = 8  # maximum groups of products under way that are followed on a path; older groups are ignored
_Group = tuple[int, frozenset[int]]  # the last instruction of a group of products, and the registers that it uses


_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


class Code:
    """The instructions of a kernel, from its binary or from nvdisasm's text."""

    def __init__(self, cubin: bytes | str) -> None:
        self.instructions: list[str] = []
        self._labels: dict[str, int] = {}
        text = cubin if isinstance(cubin, str) else tool("nvdisasm", "-c", cubin)
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                self._labels[label[1]] = len(self.instructions)
            elif matched := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*)", line):
                self.instructions.append(matched[1])

    def loops(self) -> list[list[str]]:
        """Return, in order, the innermost loops with a matrix product, each from a branch's target to the branch."""
        spans = []
        for at, instruction in enumerate(self.instructions):
            jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
            start = self._labels.get(jump[1], at) if jump else at
            if start < at and any(MMA.search(i) for i in self.instructions[start:at]):
                spans.append((start, at + 1))
        return [self.instructions[a:b] for a, b in sorted(innermost(spans))]

    def shortest_loop(self) -> list[str]:
        """Return the shortest of `loops`, which has the fewest visibility tests; [] if there is no loop."""
        return min(self.loops(), key=len, default=[])

    def beside(self) -> int:
        """Return the fewest exponentials between a wait that leaves a product (wgmma) running and the wait for all.

        Return 0 if there are no such waits.
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

    def hazards(self) -> list[str]:
        """Return the instructions that write registers of a product of sm_90 (wgmma) that may still be running.

        Such registers are those of its first operand and of its accumulator. Every path counts, also one around a loop.
        ptxas 12.8 is reported to reuse operand registers too early (triton-lang/triton#11366).
        """
        if not any("HGMMA" in each for each in self.instructions):
            return []
        places: set[int] = set()
        seen: set[tuple[int, tuple[_Group, ...], frozenset[int]]] = set()
        paths: list[tuple[int, tuple[_Group, ...], frozenset[int]]] = [(0, (), frozenset())]
        while paths:
            state = paths.pop()
            at, groups, current = state
            if at >= len(self.instructions) or state in seen:
                continue
            seen.add(state)
            instruction = self.instructions[at]
            if "HGMMA" in instruction:
                current |= _registers_of(instruction)
                if "gsb0" in instruction:
                    groups, current = (*groups, (at, current))[-_MOST_GROUPS:], frozenset()
            elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", instruction):
                running = int(wait[1], 16)
                groups = groups[max(len(groups) - running, 0) :]
            elif written := _written(instruction):
                if any(written & registers for _, registers in groups) or written & current:
                    places.add(at)
            paths += [(following, groups, current) for following in self._following(at)]
        return [self.instructions[at] for at in sorted(places)]

    def _following(self, at: int) -> list[int]:
        """Return the indices of the instructions that may run directly after instruction `at`."""
        instruction = self.instructions[at]
        name = _PREDICATE.sub("", instruction)
        targets = []
        if jump := re.match(r"BRA\b.*`\((\.L_x_\d+)\)", name):
            targets.append(self._labels[jump[1]])
        elif name.startswith("BRX"):
            targets += self._labels.values()  # a jump table may lead to any label
        always = name == instruction and re.match(r"(?:BRA(?! *U?P\d)(?!\.DIV)|BRX|EXIT|RET)\b", name)
        return targets if always else [*targets, at + 1]


def kinds(instructions: list[str]) -> dict[str, int]:
    """Return the number of instructions of each kind in KINDS."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        name = _PREDICATE.sub("", instruction)
        counts[next(kind for kind, begins in KINDS.items() if begins.match(name))] += 1
    return {kind: counts[kind] for kind in KINDS}


def _registers_of(product: str) -> frozenset[int]:
    """Return the registers of a wgmma's accumulator, and of its first operand if that is in registers."""
    name, _, operands = product[product.index("HGMMA") :].partition(" ")
    accumulator, first, *_ = (each.strip() for each in operands.rstrip(" ;").split(","))
    columns = re.search(r"\.64x(\d+)x", name)
    start = re.match(r"R(\d+)", accumulator)
    assert columns is not None, product
    used = set(range(int(start[1]), int(start[1]) + int(columns[1]) // 2)) if start else set()
    if operand := re.match(r"R(\d+)", first):
        used |= set(range(int(operand[1]), int(operand[1]) + 4))  # 64 rows of 32 bytes: 4 registers a thread
    return frozenset(used)


def _written(instruction: str) -> frozenset[int]:
    """Return the general registers that an instruction writes: its first operand after predicates."""
    name, _, rest = _PREDICATE.sub("", instruction).partition(" ")
    if name.startswith(_NO_RESULT):
        return frozenset()
    for operand in (each.strip() for each in rest.split(",")[:2]):
        if matched := re.fullmatch(r"R(\d+)(?:\.\w+)*", operand.rstrip(" ;")):
            return frozenset(range(int(matched[1]), int(matched[1]) + _width(name)))
        if not re.fullmatch(r"!?U?PT?\d*", operand):
            break
    return frozenset()


def _width(name: str) -> int:
    """Return how many registers an instruction writes."""
    if name.startswith(("LDSM", "MOVM")):
        return 4 if ".4" in name else 2 if ".2" in name else 1
    if ".128" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name or name.startswith(("DADD", "DMUL", "DFMA")) or name == "CS2R" else 1


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, local bytes) of a thread, as cuobjdump reads them from the binary."""
    text = tool("cuobjdump", "-res-usage", cubin)
    matched = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if matched is None:
        raise RuntimeError(f"cuobjdump said nothing of resources: {text}")
    registers, stack, local = map(int, matched.groups())
    return registers, stack + local


def tool(name: str, flag: str, cubin: bytes) -> str:
    """Return the output of one of Triton's packaged tools for a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True).stdout
