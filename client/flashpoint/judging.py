"""Find the judge of attention functions: another package registers it as `judge` in the entry points of `GROUP`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from flashpoint.cases import MEANT
from flashpoint.errors import invalid
from flashpoint_contract.judging import Report

GROUP = "flashpoint.judges"
_MASKS = {"bool_mask": "bool", "float_mask": "float"}
_SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")


def registered() -> Callable[..., Report]:
    """Return the judge, `flashpoint_kernels.judge`. Raises ModuleNotFoundError for a package that it needs."""
    for each in entry_points(group=GROUP, name="judge"):
        judge: Callable[..., Report] = each.load()
        return judge
    raise ModuleNotFoundError(
        "flashpoint_kernels registers no judge: install flashpoint again", name="flashpoint_kernels"
    )


def judge_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the fields of a VerifyRequest to arguments of the judge. Raises InvalidInputError."""
    given = dict(keywords)
    arguments: dict[str, Any] = {"seed": given.pop("seed")} if "seed" in given else {}
    only: dict[str, Any] = {}
    shape = given.pop("shape", None)
    if shape is not None:
        only |= {name: getattr(shape, name) for name in _SIZES}
    if (dtype := given.pop("dtype", None)) is not None:
        arguments["dtype"] = dtype
    for name in ("layout", "precision", "causal_alignment"):
        if name in given:
            arguments[name] = given.pop(name)
    if given.pop("direction", "both") == "forward":
        only["forward"] = True
    extras = given.pop("extras", ())
    masks = [_MASKS[name] for name in extras if name in _MASKS]
    only |= {"mask": masks[0]} if masks else {}
    others = tuple(name for name in extras if name not in _MASKS)
    only |= {"extras": others} if others else {}
    only |= {name: given.pop(name) for name in MEANT if name in given and name != "dropout_p"}
    if given:
        name = next(iter(given))
        raise invalid(name, "is not an option of a function that is judged")
    return arguments | ({"only": only} if only else {})
