"""Find which shapes and types a function accepts, and change cases into ones that it accepts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashpoint_contract.judging import LAYOUTS
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.trial import Outcome, Trial

_FIRST = (64, 128, 16, 32, 256, 96, 80)  # head dimensions of the first trial calls
_DIMS = (16, 32, 40, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 192, 256)
_MOST = 1 << 21  # largest number of scores of a case that was made longer


@dataclass(frozen=True)
class Shapes:
    """The shapes that a function accepts, as far as trial calls tell.

    - `multiple`: lengths must be multiples of it. `alike`: there must be as many queries as keys; `fewer`: there may be
      fewer keys than queries.
    - `grouped`: several query heads may share a key head. `batches`: there may be several sequences.
    """

    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    unlike_dims: bool = True
    multiple: int = 1
    alike: bool = False
    fewer: bool = True
    grouped: bool = True
    batches: bool = True

    def project(self, case: Case) -> Case:
        """Return a case like `case` that the function accepts: the next larger lengths, the nearest dimension."""
        dim = min(self.dims, key=lambda each: (abs(each - case.head_dim), each))
        value_dim = case.value_dim if self.unlike_dims and case.value_dim in self.dims else dim
        n, m = (-(-length // self.multiple) * self.multiple for length in (case.q_len, case.kv_len))
        if self.alike or (n > m and not self.fewer):
            m = max(n, m)
            n = m if self.alike else n
        batch = case.batch if self.batches else 1
        heads = case.q_heads, case.kv_heads if self.grouped else case.q_heads
        if self.alike and batch * heads[0] * n * m > _MOST:
            batch, heads = 1, (1, 1)
            n = m = min(n, int((_MOST**0.5) // self.multiple) * self.multiple)
        dtype = case.dtype if case.dtype in self.dtypes else self.dtypes[case.seed % len(self.dtypes)]
        return replace(
            case, head_dim=dim, value_dim=value_dim, q_len=n, kv_len=m, batch=batch, q_heads=heads[0],
            kv_heads=heads[1], dtype=dtype,
        )  # fmt: skip


def find(trial: Trial, dtypes: Sequence[str], seen: list[Outcome]) -> Shapes | None:
    """Return the shapes that the function accepts, or None if it accepts none; add the calls to `seen`."""

    def accepts(case: Case) -> bool:
        case = trial.signature.fit(case)
        if trial.signature.refuses(case) is not None:
            return False
        outcome = trial.run(case)
        seen.append(outcome)
        return outcome.status != "refused"

    first = next((case for case in _bases(dtypes) if accepts(case)), None)
    if first is None:
        return None
    sizes = {dim: replace(first, head_dim=dim, value_dim=dim) for dim in _DIMS}
    dims = tuple(dim for dim, case in sizes.items() if dim == first.head_dim or accepts(case))
    lengths = {each: replace(first, q_len=3 * each, kv_len=3 * each) for each in (11, 16, 32, 64)}
    multiple = next((each for each, case in lengths.items() if accepts(case)), 128)
    return Shapes(
        dtypes=tuple(dtype for dtype in dtypes if dtype == first.dtype or accepts(replace(first, dtype=dtype))),
        dims=dims, multiple=multiple if multiple > 11 else 1,
        unlike_dims=len(dims) > 1 and accepts(replace(first, head_dim=dims[-1], value_dim=dims[0])),
        alike=not accepts(replace(first, kv_len=2 * first.kv_len)),
        fewer=accepts(replace(first, q_len=2 * first.q_len)),
        grouped=accepts(replace(first, q_heads=2 * first.kv_heads)), batches=accepts(replace(first, batch=2)),
    )  # fmt: skip


def _bases(dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for dim in _FIRST:
            for length in (128, 256):
                yield Case(dtype=dtype, q_heads=2, kv_heads=2, q_len=length, kv_len=length, head_dim=dim, value_dim=dim,
                           seed=17, forward=True)  # fmt: skip


def find_layout(trial: Trial, dtypes: Sequence[str]) -> tuple[str, Outcome | None]:
    """Choose the layout of a function by calling it in each layout until the answer is right.

    Try the layout that the signature suggests, then those of 4 dimensions. Try layouts with fewer dimensions only if
    the function runs with none of 4, because a wrong axis may have the right size there. Return a note for the report,
    or "", and an outcome that counts as a failure, or None: the wrong first call, or the call that ended the process.
    """
    guess = trial.signature.layout
    runs: list[tuple[float, str]] = []  # (error/L, layout) for each layout in which the function runs
    first: Outcome | None = None

    def judged_as(layout: str) -> None:
        trial.signature = replace(trial.signature, layout=layout)
        trial.accepted.clear()

    def right_in(layout: str) -> bool | None:
        """Return whether the answer is right; None if the process ended."""
        nonlocal first
        trial.signature = replace(trial.signature, layout=layout)
        heads = 3 if "h" in layout else 1
        case = Case(
            batch=2 if "b" in layout else 1, q_heads=heads, kv_heads=heads, q_len=5, kv_len=5, dtype=dtypes[0],
            seed=11, forward=True,
        )  # fmt: skip
        outcome = trial.run(case)
        first = first or outcome
        if outcome.status == "refused" and (layout == guess or len(layout) == 4):
            sizes = {"head_dim": 64, "value_dim": 64, "q_len": 128, "kv_len": 128}
            outcome = trial.run(replace(case, dtype=dtypes[-1], **sizes))  # type: ignore[arg-type]
        if outcome.status == "ended":
            first = outcome
            return None
        if "o" in outcome.excess:
            runs.append((outcome.excess["o"], layout))
        return outcome.excess.get("o", math.inf) <= 1  # only o counts: another answer may be wrong in the right layout

    same_layout = ""
    for layout in dict.fromkeys((guess, *LAYOUTS)):
        if len(layout) < 4 and layout != guess and any(len(each) == 4 for _, each in runs):
            break
        right = right_in(layout)
        if right is None:  # a crash or a hang gives no information about the layout
            judged_as(guess)
            return "", first
        if right:
            same_layout = layout
            break
    if same_layout:
        other = next((each for _, each in runs if each != same_layout and len(each) == 4), None)
        said = f"right as {same_layout} (guessed); as {other} it is wrong: --layout {other}" if other else ""
        judged_as(same_layout)
        return said, None
    best: tuple[float, str] = (math.inf, guess)
    for excess, layout in runs:
        if excess < 0.01 * best[0]:
            best = excess, layout
    layout, failed = best[1] if best[0] < 1e3 else guess, first
    fewer = [each for each in LAYOUTS if len(each) < 4] if any(len(each) == 4 for _, each in runs) else []
    other = next((each for each in fewer if right_in(each)), None)
    judged_as(layout)
    said = f"judged as {layout} (guessed); as {other} it is right: --layout {other}" if other else ""
    return said, failed if failed is not None and failed.status == "wrong" and layout == guess else None
