"""Find which shapes and types a function accepts, and change cases into ones that it accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
