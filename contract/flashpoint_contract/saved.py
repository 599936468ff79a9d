"""Forwards that a service saves for their gradients: options beside `options.Options`, and the checks of both calls.

A forward with `save` leaves its inputs, options, seed, o and lse at the service, and its answer has an id. A gradient
call with that id, `saved`, brings do, and dlse where there is one; all else is the forward's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashpoint_contract.caches import CacheOption
from flashpoint_contract.options import OPTIONS, Direction, Options, ProblemError
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TENSORS, TensorInfo

SAVED_BYTES = 1024  # that a saved forward counts for beside its tensors
ID_LENGTH = 2048  # characters, at most

SAVED_OPTIONS: dict[str, CacheOption] = {
    row.name: row
    for row in (
        CacheOption("save", False, "keep this forward at the server, whose answer then has its id, `saved`"),
        CacheOption("saved", None, "id of a saved forward, whose gradients are asked with do and dlse alone"),
    )
}
CALLS: dict[str, Direction] = {"save": "forward", "saved": "backward"}
TAKEN_BESIDE = (("do", "dlse"), ("grads", "deterministic", "backend"))  # tensors and options that come with `saved`
_WHERE = "is for {path}, in JSON or safetensors, and for the SDK's {call}"
_ELSEWHERE = {
    "save": _WHERE.format(path="POST /attention", call="attention"),
    "saved": _WHERE.format(path="POST /attention/grad", call="attention_grad"),
}


def refused(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (option, reason) for each that a call which neither saves nor uses what is saved does not take."""
    found = []
    for name in SAVED_OPTIONS.keys() & options.keys():
        if name == "save" and not isinstance(options[name], bool):
            found.append((name, "must be true or false"))
        elif options[name] not in (False, None):
            found.append((name, _ELSEWHERE[name]))
    return found


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not about saving."""
    return {name: value for name, value in options.items() if name not in SAVED_OPTIONS}


def plan_saved(tensors: Mapping[str, TensorInfo], options: Options) -> Spec:
    """Check a forward that is saved, and return its problem, which answers lse. Raises ProblemError."""
    if alone := [name for name in tensors if name in TENSORS and TENSORS[name].forward_only]:
        raise ProblemError((name, "has no gradient: leave `save` out") for name in alone)
    return plan(tensors, replace(options, return_lse=True), "forward")


def saved_tensors(forward: Spec) -> dict[str, TensorInfo]:
    """Return the tensors that are kept: the inputs, o and lse."""
    return {**forward.tensors, **forward.outputs}


def saved_bytes(forward: Spec) -> int:
    """Return what a saved forward counts for."""
    return SAVED_BYTES + sum(info.nbytes for info in saved_tensors(forward).values())


def refused_beside(tensors: Iterable[str], options: Iterable[str]) -> list[tuple[str, str]]:
    """Return (field, reason) for each tensor and option that a gradient call does not take beside `saved`."""
    taken: Sequence[str] = (*TAKEN_BESIDE[0], *TAKEN_BESIDE[1])
    reason = f"is the saved forward's: beside `saved` the call takes {', '.join(taken)}"
    known = {"saved", *taken}
    return [(name, reason) for name in (*tensors, *options) if name not in known]


def plan_recalled(forward: Spec, tensors: Mapping[str, TensorInfo], chosen: Mapping[str, Any]) -> Spec:
    """Check a gradient call over a saved forward, and return its problem. Raises ProblemError.

    `tensors` are do and dlse, `chosen` the options that the call brings.
    """
    defaults = {"return_lse": OPTIONS["return_lse"].default}
    options = replace(forward.options, **{**defaults, **chosen})
    return plan({**saved_tensors(forward), **tensors}, options, "backward")
