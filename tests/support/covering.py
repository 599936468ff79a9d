"""Covering arrays: instead of all combinations, a few cases that have each pair of levels of any two factors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

Case = dict[str, Any]


def covering(
    factors: Mapping[str, Iterable[Any]], *, possible: Callable[[Case], bool] = lambda case: True, seed: int = 11
) -> list[Case]:
    """Return valid cases that together have each pair of levels, by a seeded greedy search.

    `possible` returns whether a case is valid. A pair is left out if the case that has this pair, and the first level
    of every other factor, is not valid.
    """
    rng, levels = Random(seed), {name: tuple(values) for name, values in factors.items()}
    plain = {name: values[0] for name, values in levels.items()}

    def pairs_of(case: Case) -> set[Any]:
        return {((a, case[a]), (b, case[b])) for a, b in combinations(levels, 2)}

    missing = {
        ((a, x), (b, y))
        for a, b in combinations(levels, 2)
        for x, y in product(levels[a], levels[b])
        if possible(plain | {a: x, b: y})
    }
    cases = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)  # each round covers at least this pair
        tried = [{name: rng.choice(values) for name, values in levels.items()} | {a: x, b: y} for _ in range(60)]
        best = max((case for case in tried if possible(case)), key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def cover(*, indirect: Sequence[str] = (), **factors: Iterable[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test over a covering array. `make test` runs only cases with a level that no earlier case has.

    CI runs all cases. The levels of a factor are an iterable of values, or a mapping of names to values; the names are
    in the test's id. `indirect` has the factors that are fixtures.
    """
    named = {
        factor: dict(levels) if isinstance(levels, Mapping) else {str(level): level for level in levels}
        for factor, levels in factors.items()
    }
    seen: set[tuple[str, str]] = set()
    params = []
    for case in covering(named):
        new = set(case.items()) - seen
        seen |= new
        values = [named[factor][name] for factor, name in case.items()]
        params.append(pytest.param(*values, id="-".join(case.values()), marks=() if new else pytest.mark.slow))
    return pytest.mark.parametrize(tuple(factors), params, indirect=indirect)
