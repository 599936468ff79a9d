"""Check a compiled kernel's PTX: are asynchronous copies fenced before a matrix instruction, and do loads run ahead?

`cp.async` writes shared memory through the generic proxy; `wgmma` and `tcgen05.mma` read it through the async proxy.
The wait for the copy does not order the two: a `fence.proxy.async` must stand between (PTX ISA, "Async proxy"). Triton
before 3.7.1 omits this fence (triton-lang/triton#9610). Triton from 3.7.1 on accepts any fence after the start of a
copy, even a fence before the copy has arrived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);")
_WAIT = re.compile(r"cp\.async\.wait_(?:group\s+(\d+)|all)")
_COMMIT = re.compile(r"cp\.async\.commit_group")
_WIDE_COPY = re.compile(r"cp\.async\.cg\.")  # copies of 16 bytes; smaller copies are cp.async.ca
_FENCE = re.compile(r"fence\.proxy\.async")
_ASYNC_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma)\b")
_MOST_GROUPS = 16  # maximum groups of copies under way that are followed on a path; older groups are ignored
_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")


class _State(NamedTuple):
    """The state of the asynchronous copies at one point of a path through the code.

    `unfenced`: a copy of 16 bytes has arrived since the last fence. `wide`: a copy of 16 bytes began since the last
    commit. `under_way`: for each committed group of copies that has not arrived, whether it has a copy of 16 bytes.
    """

    unfenced: bool
    wide: bool
    under_way: tuple[bool, ...]

    def after(self, line: str) -> _State:
        """Return the state after a line of PTX."""
        if wait := _WAIT.search(line):
            running = int(wait[1] or 0)
            arrived = self.under_way[: max(len(self.under_way) - running, 0)]
            return self._replace(
                unfenced=self.unfenced or any(arrived), under_way=self.under_way[len(arrived) :]
            )  # fmt: skip
        if _COMMIT.search(line):
            return self._replace(wide=False, under_way=(*self.under_way, self.wide)[-_MOST_GROUPS:])
        if _WIDE_COPY.search(line):
            return self._replace(wide=True)
        return self._replace(unfenced=False) if _FENCE.search(line) else self


class Ptx:
    """The lines of a kernel, and the line of each label."""

    def __init__(self, text: str) -> None:
        self.lines = [line.strip() for line in text.splitlines()]
        self._labels = {label[1]: at for at, line in enumerate(self.lines) if (label := _LABEL.match(line))}

    def missing_fences(self) -> int:
        """Return the number of matrix instructions that read a copied tile without a proxy fence.

        The fence must stand between the wait for the copy and the matrix instruction. All paths are followed, also
        those around loops. On a path, only the first such instruction after a wait counts. Only copies of 16 bytes
        count: in kernels for aligned tensors the narrower ones are of masks, which no matrix instruction reads.
        """
        if not any(_WAIT.search(line) for line in self.lines):
            return 0
        places: set[int] = set()
        seen: set[tuple[int, _State]] = set()
        paths: list[tuple[int, _State]] = [(0, _State(unfenced=False, wide=False, under_way=()))]
        while paths:
            at, state = paths.pop()
            while at < len(self.lines) and (at, state) not in seen:
                seen.add((at, state))
                line = self.lines[at]
                if state.unfenced and _ASYNC_PRODUCT.search(line):
                    places.add(at)
                    state = state._replace(unfenced=False)
                state = state.after(line)
                at += 1
                if branch := _BRANCH.match(line):
                    target = self._labels[branch[2]]
                    if branch[1]:
                        paths.append((target, state))
                    else:
                        at = target
                elif line.startswith("ret;"):
                    break
        return len(places)

    def loops(self) -> list[list[str]]:
        """Return the innermost loops with a matrix product, each from a backward branch's target to the branch."""
        spans = []
        for at, line in enumerate(self.lines):
            start = self._labels[branch[2]] if (branch := _BRANCH.match(line)) else at
            if start < at and any(_PRODUCT.search(each) for each in self.lines[start:at]):
                spans.append((start, at))
        return [self.lines[a:b] for a, b in innermost(spans)]

    def loads_ahead(self) -> int:
        """Return the fewest groups of copies that are under way at a matrix product of `loops`; 0 without a copy.

        A group copies a tile of one tensor, or the tile's row statistics.
        """
        return min((_ahead(loop) for loop in self.loops()), default=0)


def innermost(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans, (first line, end), that contain no other span."""
    return [(a, b) for a, b in spans if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)]


def _ahead(loop: list[str]) -> int:
    """Return the fewest groups of copies under way at a matrix product of `loop`, in its third iteration."""
    under_way, fewest = 0, 1 << 30
    for turn in range(3):
        for line in loop:
            if wait := _WAIT.search(line):
                under_way = min(under_way, int(wait[1] or 0))
            elif _COMMIT.search(line):
                under_way += 1
            elif turn == 2 and _PRODUCT.search(line):
                fewest = min(fewest, under_way)
    return fewest
