"""The kernels that test the judge: right ones, wrong ones, and variants that are wrong only for 16-bit types.

Each kernel is a function of this module, so that `flashpoint verify --kernel tests.judge.corpus:NAME` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.judge import accepted, options, reported, siblings
from tests.judge.right import RIGHT as FIRST_RIGHT
from tests.judge.tiled import kernel
from tests.judge.wrong import STEPS
from tests.judge.wrong_calls import CALLS


@dataclass(frozen=True)
class Wrong:
    """A wrong kernel: its group, its function, its mistake in words, and the codes of causes that name this mistake."""

    group: str
    function: Callable[..., Any]
    text: str
    codes: tuple[str, ...]


# The judge can find these mistakes only in float32: with 16-bit types, such rounding is allowed or changes nothing.
_FLOAT32_ALONE = ("scores_in_bfloat16", "sum_in_bfloat16", "products_in_bfloat16")


def _wrong() -> dict[str, Wrong]:
    results = {}
    for name, (steps, codes) in STEPS.items():
        text = (steps.__doc__ or "").strip()
        results[name] = Wrong("steps", kernel(steps), text, codes)
        if name not in _FLOAT32_ALONE:
            half = kernel(steps, "half")
            results[f"{name}_half"] = Wrong(
                "steps, in 16-bit types alone", half, f"In 16-bit types alone: {text}", codes
            )
    for name, (steps, codes) in siblings.STEPS.items():
        results[name] = Wrong("siblings of these", kernel(steps), (steps.__doc__ or "").strip(), codes)
    for group, kernels in ({"options": options.WRONG} | reported.WRONG).items():
        results |= {n: Wrong(group, *each) for n, each in kernels.items()}
    calls = CALLS | siblings.CALLS
    return results | {
        n: Wrong("calls", each, (each.__doc__ or "").strip(), codes) for n, (each, codes) in calls.items()
    }


WRONG = _wrong()
RIGHT = FIRST_RIGHT | siblings.RIGHT | accepted.RIGHT

for _name, _function in [*((n, each.function) for n, each in WRONG.items()), *RIGHT.items()]:
    if _function.__module__.startswith("tests."):
        _function.__module__ = __name__
        _function.__qualname__ = _function.__name__ = _name
        globals()[_name] = _function
