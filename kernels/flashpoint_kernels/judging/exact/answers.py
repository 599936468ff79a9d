"""Lay out the inputs of a call in memory, and find from bytes what a call answered and what it changed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import DTYPE_NAMES, DTYPES

_DIFFERENT = 4  # number of differing answers of a repeated call that are kept
_KEPT = 4  # as in `child`
_OTHERS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}
_SETTINGS = (
    "default data type", "default device", "gradient mode", "precision of float32 products", "deterministic algorithms",
    "autocast", "flush of denormal numbers", "inference mode", "number of threads", "modes of function calls",
    "functions (it replaces some)", "profiler or tracer", "callbacks of the garbage collector", "timers of signals",
    "threads (one goes on after the call)",
)  # fmt: skip


def viewed(t: Tensor, view: str) -> Tensor:
    """Return a tensor with the same values in another memory form, surrounded by NaN or the largest integers."""
    filler = float("nan") if t.is_floating_point() else 1 if t.dtype == torch.bool else torch.iinfo(t.dtype).max
    if view == "transposed" and t.ndim >= 3:  # the strides that `view(B, S, H, D).transpose(1, 2)` gives
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if view == "strided":  # every second element of a last dimension of double size
        wide = t.new_full((*t.shape, 2), filler)
        wide[..., 0] = t
        return wide[..., 0]
    if view == "rows" and t.ndim >= 2:  # rows with a larger stride, as in a packed projection
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 8), filler)
        wide[..., 8 : 8 + t.shape[-1]] = t
        return wide[..., 8 : 8 + t.shape[-1]]
    if view in ("offset", "misaligned", "ended"):
        ahead = {"offset": 64, "misaligned": 1, "ended": 0}[view]
        room = t.new_full((t.numel() + ahead + 64,), filler)
        part = room[ahead : ahead + t.numel()].view(t.shape)
        part.copy_(t)
        return part
    if view == "columns" and t.ndim >= 2:  # the last two dimensions are transposed in memory
        return t.mT.contiguous().mT
    if view == "expanded":  # all elements share one memory cell, like the gradient of a sum
        return t.reshape(-1)[:1].clone().reshape((1,) * t.ndim).expand(t.shape) if t.numel() else t
    return t


def listed(inputs: Mapping[str, Tensor], leaves: set[str]) -> tuple[list[bytes], list[list[Any]]]:
    """Return the bytes of each storage, and how each tensor lies in them, for `child`."""
    blocks: list[bytes] = []
    at: dict[int, int] = {}
    places = []
    for name, t in inputs.items():
        t = t.detach().cpu()
        storage = t.untyped_storage()
        key = storage.data_ptr() if storage.nbytes() else -len(at) - 1
        if key not in at:
            at[key] = len(blocks)
            blocks.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b"")
        dtype = DTYPE_NAMES.get(t.dtype, str(t.dtype)[6:])
        places.append([name, at[key], dtype, list(t.shape), list(t.stride()), t.storage_offset(), name in leaves])
    return blocks, places


def _tensor(dtype: str, shape: list[int], stride: list[int], data: bytearray) -> Tensor:
    to = DTYPES.get(dtype) or _OTHERS[dtype]
    flat = torch.frombuffer(data, dtype=to) if data else torch.empty(0, dtype=to, device="cpu")
    return flat.as_strided(shape, stride) if data else flat.reshape(shape)


class Answers:
    """The answers of one process to its calls, and what these calls changed.

    Facts about a call, a dict: `error`, `grad_error`: an exception of the function or of its backward; `bad`: why the
    answer cannot be judged; `state`: changed settings of the process; `changed`: inputs; `overwritten`: answers of
    earlier calls; `overwritten_by_second`: gradients that a second backward changed; `aliases`: pairs of an answer and
    the input, or earlier answer, whose memory it shares; `grad`, `lse_grad`: whether o and lse have a gradient;
    `unused`: inputs without one; `seconds`. Repeated calls have `calls`, and how often the bits of the `forward` and
    of a `gradient` differed.
    """

    def __init__(self, device: str, settings: list[str]) -> None:
        self.device = torch.device(device).type
        self.settings = settings
        self.earlier: list[list[tuple[str, int, bytes]]] = []  # name, address and bytes of the answers of each call
        self.states: list[set[Any]] = [set(), set(), set()]  # what calls have left of each generator that they used

    def begin(self, inputs: Mapping[str, Tensor], blocks: list[bytes], request: Mapping[str, Any]) -> None:
        """Prepare for the answers to a call."""
        self.blocks, self.repeated = blocks, "times" in request
        self.overwritten = any(each.get("zeroed") for each in [request, *request.get("calls", ())])
        names: dict[int, list[str]] = {}
        at: dict[int, int] = {}
        for name, t in inputs.items():
            key = t.untyped_storage().data_ptr() or -len(at) - 1
            names.setdefault(at.setdefault(key, len(at)), []).append(name)
        self.names = names
        self.facts: dict[str, Any] = {"state": [], "changed": [], "overwritten": set(), "aliases": []}
        self.found: dict[str, Tensor] = {}
        self.now: list[tuple[str, int, bytes]] = []
        self.first: dict[str, tuple[str, bytes]] = {}
        self.addresses: list[int] = []
        self.lse = self.stopped = False
        self.turns, self.forward, self.gradient = 0, 0, 0
        self.other: list[int] = []
        self.turn: dict[str, tuple[list[Any], bytearray]] = {}

    def take(self, header: list[Any], data: bytearray) -> None:
        """Take one message about the call."""
        kind = header[0]
        if kind == "answer":
            n, name, *about = header[1:]
            self.turn[f"{n}.{name}" if n else name] = (about, data)
        elif kind == "fact":
            self._fact(*header[1:])
        elif kind == "turn":
            self._turn()
        elif kind == "process":
            self._process(*header[1:])
        elif kind == "input":
            self.addresses.append(header[5])
            if not self.overwritten and data[: len(self.blocks[header[1]])] != self.blocks[header[1]]:
                self.facts["changed"] += self.names.get(header[1], [])
        elif kind == "earlier":
            name, _, kept = self.earlier[header[1]][header[2]]
            if data != kept:
                self.facts["overwritten"].add(name)
        elif kind == "failed":
            self.facts["error"] = header[1] | {"clear": False}

    def end(self, kept: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the facts and the answers."""
        facts = self.facts
        own = dict(zip(self.addresses, (self.names.get(n, []) for n in range(len(self.addresses))), strict=True))
        before = {address for each in self.earlier for _, address, data in each if data}
        for name, address, data in self.now:
            if data and not self.repeated:
                facts["aliases"] += [[name, other] for other in own.get(address, ())]
                facts["aliases"] += [[name, "an earlier answer"]] if address in before else []
        if kept:
            self.earlier = [*self.earlier[1 - _KEPT :], self.now]
        facts["overwritten"] = sorted(facts["overwritten"])
        if self.repeated:
            facts |= {"calls": self.turns, "forward": self.forward, "gradient": self.gradient, "other": self.other}
        return facts, self.found

    def _fact(self, n: int, name: str, value: Any) -> None:
        prefix = f"{n}." if n else ""
        if name == "form":
            self.facts[f"{prefix}grad"], self.facts[f"{prefix}lse_grad"] = (
                len(value) > at and len(value[at]) > 1 and bool(value[at][-2]) for at in (0, 1)
            )
            if (bad := self._unusable(value[0] if value else None)) is not None:
                dense = bad.startswith("a ")
                must = "a dense tensor of q's type" if dense else "a tensor, or a tuple that begins with one"
                self.facts.setdefault("bad", f"it returned {bad}, but must return {must}")
            self.lse = len(value) > 1 and self._unusable(value[1]) is None and value[1][-1] == value[0][-1] - 1
            return
        self.facts[prefix + name] = value

    def _unusable(self, form: list[Any] | None) -> str | None:
        """Return why an answer cannot be judged, for example its type; None if it can be judged."""
        if form is None or len(form) == 1:
            return "nothing" if form is None or form == ["NoneType"] else form[0]
        kind, plain, layout, nested, device, dtype, _, _ = form
        if nested or layout != "strided":
            return "a nested tensor" if nested else f"a tensor of layout {layout}"
        if device != self.device:
            return f"a tensor on {device}"
        if not plain:
            return f"a {kind} with hooks" if kind in ("Tensor", "Parameter") else f"a {kind}, which is no torch.Tensor"
        return None if dtype in DTYPES else f"a tensor of {dtype}"

    def _turn(self) -> None:
        """Take all answers of one call: convert those of the first, and compare the bytes of later ones with them."""
        turn, self.turn = self.turn, {}
        if self.stopped:
            return
        self.turns += 1
        self.stopped = not self.facts.keys().isdisjoint(("error", "grad_error", "bad"))
        for name, (_, data) in turn.items():
            if name.startswith("again ") and data != turn[f"first {name[6:]}"][1]:
                self.facts.setdefault("overwritten_by_second", []).append(name[6:])
        turn = {n: each for n, each in turn.items() if not n.startswith(("again ", "first "))}
        differ = [n for n, (about, data) in turn.items() if self.first.get(n) != (str(about[:3]), bytes(data))]
        if self.turns == 1 or (differ and len(self.other) < _DIFFERENT):
            prefix = f"{self.turns - 1}." if self.repeated else ""
            for name, ((dtype, shape, stride, *_), data) in turn.items():
                if (name != "lse" or self.lse) and (dtype in DTYPES or dtype in _OTHERS):
                    self.found[prefix + name] = _tensor(dtype, shape, stride, data)
        if self.turns == 1:
            self.first = {n: (str(about[:3]), bytes(data)) for n, (about, data) in turn.items()}
            self.now = [
                (n, about[3] if about[4] else 0, self.first[n][1]) for n, (about, _) in turn.items() if "dd" not in n
            ]
            return
        self.forward += any(n.rpartition(".")[2] in ("o", "lse") for n in differ)
        self.gradient += any(n.rpartition(".")[2][:1] == "d" for n in differ)
        if differ and len(self.other) < _DIFFERENT:
            self.other.append(self.turns - 1)

    def _process(self, seconds: float, settings: list[str], before: list[Any], after: list[Any]) -> None:
        self.facts["seconds"] = seconds
        pairs = zip(_SETTINGS, self.settings, settings, strict=True)
        self.facts["state"] = [name for name, was, now in pairs if was != now]
        used = zip(self.states, (before[0], *before[2:]), (after[0], *after[2:]), strict=True)
        seeds = before[1] != after[1]
        for seen, was, now in used:
            seeds |= was != now and now in seen
            seen |= {now} - {was}
        if seeds:
            self.facts["state"].append("random numbers (it seeds a generator)")
