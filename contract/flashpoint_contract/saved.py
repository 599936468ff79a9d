"""Forwards that a server saves for gradient calls: options in addition to `options.Options`, and checks.

A forward with `save` stores its inputs, options, seed, o and lse on the server, and returns an id. A gradient call with
this id, `saved`, sends do, and dlse if needed. The server takes everything else from the saved forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashpoint_contract.caches import CacheOption
from flashpoint_contract.options import OPTIONS, Direction, Options, ProblemError
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo, refusals

SAVED_BYTES = 1024  # bytes of a saved forward that count against the memory limit, in addition to its tensors
ID_LENGTH = 2048  # maximum characters of a saved forward's id

SAVED_OPTIONS: dict[str, CacheOption] = {
    row.name: row
    for row in (
        CacheOption("save", False, "save this forward on the server; the answer contains its id, `saved`"),
        CacheOption("saved", None, "id of a saved forward; its gradients need only do and dlse"),
    )
}
CALLS: dict[str, Direction] = {"save": "forward", "saved": "backward"}
TAKEN_BESIDE = (("do", "dlse"), ("grads", "deterministic", "backend"))  # tensors and options allowed with `saved`
_WHERE = "is only for {path}, in JSON or safetensors, and for the SDK's {call}"
_ELSEWHERE = {
    "save": _WHERE.format(path="POST /attention", call="attention"),
    "saved": _WHERE.format(path="POST /attention/grad", call="attention_grad"),
}


def refused(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (option, reason) for each of `save` and `saved` that is set in the `options` of a call without support."""
    errors = []
    for name in SAVED_OPTIONS.keys() & options.keys():
        if name == "save" and not isinstance(options[name], bool):
            errors.append((name, "must be true or false"))
        elif options[name] not in (False, None):
            errors.append((name, _ELSEWHERE[name]))
    return errors


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without `save` and `saved`."""
    return {name: value for name, value in options.items() if name not in SAVED_OPTIONS}


def plan_saved(tensors: Mapping[str, TensorInfo], options: Options) -> Spec:
    """Check a forward with `save`, and return its problem, whose outputs always include lse. Raises ProblemError."""
    if refused := refusals("saved", [*tensors, *options.given]):
        raise ProblemError(refused)
    return plan(tensors, replace(options, return_lse=True), "forward")


def saved_tensors(forward: Spec) -> dict[str, TensorInfo]:
    """Return the dtypes and shapes of the tensors that the server saves for a forward: its inputs, o and lse."""
    return {**forward.tensors, **forward.outputs}


def saved_bytes(forward: Spec) -> int:
    """Return the number of bytes that a saved forward counts against the server's memory limit."""
    return SAVED_BYTES + sum(info.nbytes for info in saved_tensors(forward).values())


def refused_beside(tensors: Iterable[str], options: Iterable[str]) -> list[tuple[str, str]]:
    """Return (field, reason) for each tensor and option that a gradient call with `saved` must not send."""
    taken: Sequence[str] = (*TAKEN_BESIDE[0], *TAKEN_BESIDE[1])
    reason = f"is part of the saved forward: with `saved`, send only {', '.join(taken)}"
    known = {"saved", *taken}
    return [(name, reason) for name in (*tensors, *options) if name not in known]


def recalled_options(forward: Spec, chosen: Mapping[str, Any]) -> Options:
    """Return the options of a gradient call for a saved forward: the forward's, and those that the call has `chosen`.

    The call's tensors are `saved_tensors`, do and dlse. Raises ProblemError.
    """
    return replace(forward.options, **{"return_lse": OPTIONS["return_lse"].default, **chosen})
