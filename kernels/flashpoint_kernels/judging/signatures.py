"""Find the signature of a function: its parameters by Flashpoint's names, its layout, and the arguments for a case."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.options import OPTIONS, Options
from flashpoint_contract.tensors import TENSORS
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.problems.problem import Problem

_NAMES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "window_left", "sliding_window"),
    "softcap": ("softcap", "logits_soft_cap", "soft_cap", "logit_softcapping"),
    "attn_mask": ("attn_mask", "mask", "attention_mask", "attn_bias", "bias"),
    "alibi_slopes": ("alibi_slopes",),
    "sinks": ("sinks", "sink", "s_aux", "learnable_sink"),
    "kv_lengths": ("kv_lengths", "cache_seqlens", "seqused_k"),
    "return_lse": ("return_lse", "return_attn_probs", "return_softmax_lse"),
    "cu_seqlens_q": ("cu_seqlens_q",), "cu_seqlens_k": ("cu_seqlens_k",),
    "max_seqlen_q": ("max_seqlen_q",), "max_seqlen_k": ("max_seqlen_k",),
    "cu_seqlens": ("cu_seqlens",), "max_seqlen": ("max_seqlen",),
    "enable_gqa": ("enable_gqa",), "dropout_p": ("dropout_p", "dropout", "p"), "layout": ("layout",),
}  # fmt: skip
_MEANT = {theirs: ours for ours, names in _NAMES.items() for theirs in names}
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class UnusableError(ValueError):
    """The function cannot be called with tensors q, k and v, or with this case."""


@dataclass(frozen=True)
class Signature:
    """A function's parameters, and the layout that its tensors have.

    - `style`: `sdpa`, `flash-attn`, `flashinfer`, `flashpoint` or `plain`.
    - `takes`: maps Flashpoint's names of options and tensors to the function's names.
    - `order`: the positional-only parameters after q, k and v, by Flashpoint's names.
    - `packed`: which tensors are one argument: `qkv`, `kv` or none. `ragged`: the function takes cu_seqlens.
    - `top_left`: the causal mask is aligned top left if the case does not name an alignment.
    """

    name: str
    style: str
    takes: Mapping[str, str]
    order: tuple[str, ...]
    required: tuple[str, ...]
    layout: str
    packed: str = ""
    ragged: bool = False
    top_left: bool = False
    base_2: bool = False
    int_window: bool = False
    ambiguous: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()  # the function's names of q, k and v, if they are passed by name

    @property
    def options(self) -> frozenset[str]:
        """Return the options and tensors of a `Case` that the function accepts."""
        return frozenset(n for n in self.takes if n in (*OPTIONS, *TENSORS)) - {"return_lse", "layout", "dropout_p"}

    def fit(self, case: Case) -> Case:
        """Return the case with sizes that the signature can express."""
        if self.packed == "qkv":
            case = replace(case, kv_heads=case.q_heads, kv_len=case.q_len, value_dim=case.head_dim)
        if self.packed == "kv":
            case = replace(case, value_dim=case.head_dim)
        if "b" not in self.layout and not self.ragged:
            case = replace(case, batch=1)
        if "h" not in self.layout and not self.ragged:
            case = replace(case, q_heads=1, kv_heads=1)
        return case

    def refuses(self, case: Case) -> str | None:
        """Return why the signature cannot express a case; None if it can."""
        if missing := case.options - self.options:
            return f"it has no parameter {sorted(missing)[0]}"
        if case.mask and case.causal and self.style == "sdpa":
            return "attn_mask and is_causal are not taken together"
        if self.packed == "qkv" and not (
            case.q_heads == case.kv_heads and case.q_len == case.kv_len and case.head_dim == case.value_dim
        ):
            return "packed q, k and v have one shape"
        if self.packed == "kv" and case.head_dim != case.value_dim:
            return "packed k and v have one shape"
        if "b" not in self.layout and case.batch > 1 and not self.ragged:
            return "it has no batch dimension"
        if "h" not in self.layout and case.q_heads > 1 and not self.ragged:
            return "it has no dimension of heads"
        if (
            self.int_window
            and case.window != (-1, -1)
            and not (case.window[0] >= 0 and (case.window[1] == -1 or (case.causal and case.window[1] == 0)))
        ):
            return "its window has a left side alone"
        if self.ragged and (case.mask or "kv_lengths" in case.extras):
            return "packed sequences have no mask"
        return None


def signature_of(about: Mapping[str, Any], layout: str | None = None, top_left: bool | None = None) -> Signature:
    """Return the signature of a function that `child.described` describes. Raises UnusableError."""
    name, parameters = about["name"], about["parameters"]
    if parameters is None and name != "scaled_dot_product_attention":  # compiled code: pass only q, k and v
        parameters = [
            {"name": n, "kind": "POSITIONAL_ONLY", "required": True, "default": None} for n in ("q", "k", "v")
        ]
    elif parameters is None:
        parameters = [
            {
                "name": n,
                "kind": "KEYWORD_ONLY" if i > 2 else "POSITIONAL_OR_KEYWORD",
                "required": i < 3,
                "default": None,
            }
            for i, n in enumerate(SDPA)
        ]
    named = [p for p in parameters if p["kind"] not in ("VAR_POSITIONAL", "VAR_KEYWORD")]
    first = named[0]["name"] if named else ""
    packed = "qkv" if first == "qkv" else "kv" if len(named) > 1 and named[1]["name"] == "kv" else ""
    count = {"qkv": 1, "kv": 2, "": 3}[packed]
    if len(named) < count and not any(p["kind"] == "VAR_POSITIONAL" for p in parameters):
        raise UnusableError(f"{name} has {len(named)} parameters, but is called as {name}(q, k, v, …)")
    by_name = tuple(p["name"] for p in named[:count] if p["kind"] == "KEYWORD_ONLY")
    if by_name and len(by_name) < count:
        raise UnusableError(f"{name} takes some of q, k and v by name alone, and others by place")
    takes: dict[str, str] = {}
    order: list[str] = []
    required: list[str] = []
    ambiguous: list[str] = []
    int_window = False
    for p in named[count:]:
        ours = _MEANT.get(p["name"], p["name"] if p["name"] in (*OPTIONS, *TENSORS) else None)
        if ours == "window" and p["name"] in ("window_left", "sliding_window"):
            int_window = True
        elif ours == "window" and isinstance(p["default"], int) and not isinstance(p["default"], bool):
            ambiguous.append(f"{p['name']}: one number may count keys with or without the query's own")
            ours = None
        if ours == "attn_mask" and p["name"] in ("bias", "attn_bias") and "xformers" in about["module"]:
            ours = None
        if ours is None:
            if p["required"]:
                raise UnusableError(
                    f"{name} needs a parameter {p['name']!r}, whose meaning is not known: give it a default, or wrap it"
                )
            continue
        takes.setdefault(ours, p["name"])
        if p["kind"] == "POSITIONAL_ONLY":
            order.append(ours)
        if p["required"]:
            required.append(ours)
    ragged = ("cu_seqlens_q" in takes or "cu_seqlens" in takes) and "layout" not in takes
    if not ragged:
        takes = {n: theirs for n, theirs in takes.items() if not n.startswith(("cu_seqlens", "max_seqlen"))}
    style, base_2 = "plain", False
    if "softmax_scale" in takes.values() or "window_size" in takes.values() or packed:
        style = "flash-attn"
    if "is_causal" in takes.values():
        style = "sdpa"
    if "kv_layout" in [p["name"] for p in named]:
        style, base_2 = "flashinfer", True
    if about["module"].startswith("flashpoint_kernels"):
        style = "flashpoint"
    guess = {"flash-attn": "bshd", "flashinfer": "shd"}.get(style, "bhsd")
    return Signature(
        name=name, style=style, takes=takes, order=tuple(order), required=tuple(required), layout=layout or guess,
        packed=packed, ragged=ragged, base_2=base_2, int_window=int_window, ambiguous=tuple(ambiguous),
        by_name=by_name,
        top_left=("is_causal" in takes.values()) if top_left is None else top_left,
    )  # fmt: skip


@dataclass
class Call:
    """A case as a call of one function: the data for the function's process, and the case as a `Problem`."""

    case: Case
    request: dict[str, Any]
    tensors: dict[str, Tensor]  # in the function's layout
    problem: Problem  # of direction `backward`, with do; also used to judge o and lse
    signature: Signature

    def canonical(
        self, answers: Mapping[str, Tensor], *, any_type: bool = False
    ) -> tuple[dict[str, Tensor], str | None]:
        """Return answers in bhsd (or thd) by Flashpoint's names, and a message about a wrong shape or type, or None."""
        s, spec = self.signature, self.problem.spec
        canonical: dict[str, Tensor] = {}
        for name, t in answers.items():
            if name == "dqkv":
                canonical |= dict(zip(("dq", "dk", "dv"), t.unbind(-3), strict=True))
            elif name == "dkv":
                canonical |= dict(zip(("dk", "dv"), t.unbind(-3), strict=True))
            else:
                canonical[name] = t
        for name, t in list(canonical.items()):
            if name == "lse":
                canonical[name] = _lse(t, s, self.case) * (math.log(2) if s.base_2 else 1)
                if canonical[name].shape != spec.lse_shape:
                    del canonical[name]  # the function returned another statistic than lse
                continue
            if name == "o" or name[1:] in ("q", "k", "v"):
                canonical[name] = t if s.ragged else _to_bhsd(t, s.layout)
            wanted = (*spec.lse_shape, spec.value_dim) if name == "o" and not s.ragged else None
            if name == "o" and s.ragged:
                wanted = (*self.problem.tensors["q"].shape[:-1], spec.value_dim)
            if wanted is not None and tuple(canonical[name].shape) != tuple(wanted):
                expected = list(self.tensors["do"].shape)
                return {}, f"o has shape {list(t.shape)}, but must have {expected} (layout {s.layout})"
            if name == "o" and not any_type and t.dtype != self.problem.tensors["q"].dtype:
                return {}, f"o is {str(t.dtype)[6:]}, but must be {spec.dtype}, as q is"
        return canonical, None


def _to_bhsd(t: Tensor, layout: str) -> Tensor:
    """Return a tensor in bhsd; return it unchanged if its rank does not fit the layout."""
    if t.ndim != len(layout):
        return t
    full, letters = t, layout
    for letter in "bh":
        if letter not in letters:
            full, letters = full[None], letter + letters
    return full.permute([letters.index(letter) for letter in "bhsd"])


def from_bhsd(t: Tensor, layout: str) -> Tensor:
    permuted = t.permute(
        *("bhsd".index(letter) for letter in layout), *("bhsd".index(x) for x in "bhsd" if x not in layout)
    )
    return permuted.reshape(permuted.shape[: len(layout)]).contiguous()


def _lse(t: Tensor, s: Signature, case: Case) -> Tensor:
    if s.ragged:
        return t if t.shape[0] == case.q_heads else t.mT
    shape = case.batch, case.q_heads, case.q_len
    if shape[1] == shape[2] > 1 and s.style in ("plain", "flashinfer"):  # its shape does not tell the order of its axes
        return t.mT.expand(shape) if s.style == "flashinfer" and t.ndim == 2 else t[..., 0]
    if t.shape == shape:
        return t
    if t.ndim == 3 and tuple(t.shape) == (shape[0], shape[2], shape[1]):
        return t.mT
    if t.ndim == 2 and shape[0] == 1 and tuple(t.shape) == shape[1:]:
        return t[None]
    if t.ndim == 2 and shape[0] == 1 and tuple(t.shape) == (shape[2], shape[1]):
        return t.mT[None]
    if t.ndim == 2 and shape[1] == 1 and tuple(t.shape) == (shape[0], shape[2]):
        return t[:, None]
    if t.ndim == 1 and shape[:2] == (1, 1):
        return t[None, None]
    return t


def call_of(signature: Signature, case: Case, tensors: Mapping[str, Tensor], precision: str = "ieee") -> Call:
    """Return the call for a case, from tensors in bhsd that `values.draw` made."""
    s = signature
    sent = dict(tensors)
    alignment = "top_left" if s.top_left else case.alignment
    options = Options(
        causal=case.causal, causal_alignment=alignment, window=case.window, softcap=case.softcap, scale=case.scale,
        layout="thd" if s.ragged else "bhsd", precision=precision,
    )  # fmt: skip
    if s.ragged:
        for name in ("q", "k", "v", "do"):
            counts = [length[name in "kv"] for length in case.lengths]
            sequences = zip(sent[name].transpose(1, 2), counts, strict=True)
            sent[name] = torch.cat([t[:count] for t, count in sequences])
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            ends = [0, *itertools.accumulate(length[side] for length in case.lengths)]
            sent[name] = torch.tensor(ends, dtype=torch.int32, device="cpu")
    if "attn_mask" in sent and sent["attn_mask"].dtype != torch.bool:
        options = replace(options, grads=("dq", "dk", "dv"))
    problem = Problem.create(sent, options, "backward")
    given = {n: t if s.ragged or n not in ("q", "k", "v", "do") else from_bhsd(t, s.layout) for n, t in sent.items()}
    leaves = ["q", "k", "v"]
    if s.packed == "qkv":
        given["qkv"] = torch.stack([given.pop(n) for n in "qkv"], dim=-3)
        leaves = ["qkv"]
    elif s.packed == "kv":
        given["kv"] = torch.stack([given.pop(n) for n in "kv"], dim=-3)
        leaves = ["q", "kv"]
    values: dict[str, Any] = {n: {"tensor": n} for n in given if n in TENSORS and n not in ("q", "k", "v", "do")}
    if "cu_seqlens" in s.takes and s.ragged:
        values["cu_seqlens"] = {"tensor": "cu_seqlens_q"}
    leaves += [n for n in ("attn_mask", "sinks") if n in given and given[n].is_floating_point()]
    values |= {"max_seqlen_q": case.q_len, "max_seqlen_k": case.kv_len, "max_seqlen": case.q_len}
    usual = {"causal": False, "scale": case.head_dim**-0.5, "window": [-1, -1], "softcap": 0.0, "dropout_p": 0.0,
             "return_lse": True, "attn_mask": None, "alibi_slopes": None, "enable_gqa": False}  # fmt: skip
    for name in case.options:
        if name in ("causal", "window", "softcap", "scale"):
            values[name] = getattr(case, name)
    if "window" in values:
        values["window"] = _window(s, case)
    if case.q_heads != case.kv_heads:
        values["enable_gqa"] = True
    values["return_lse"] = not case.bare
    values["layout"] = s.layout
    values |= {"dropout_p": case.dropout} if case.dropout else {}
    args: list[Any] = [
        {"tensor": n} for n in (("qkv",) if s.packed == "qkv" else ("q", "kv") if s.packed else ("q", "k", "v"))
    ]
    args += [values.get(name, usual.get(name)) for name in s.order]
    own_names = dict(zip(s.by_name, args, strict=False))
    args = args[len(own_names) :]
    keywords = {theirs: values[ours] for ours, theirs in s.takes.items() if ours in values and ours not in s.order}
    keywords |= {s.takes[n]: usual.get(n) for n in s.required if n not in s.order and s.takes[n] not in keywords}
    if "layout" in keywords and s.style != "flashpoint":
        del keywords["layout"]
    request = {"op": "call", "args": args, "kwargs": own_names | keywords, "leaves": [] if case.forward else leaves}
    return Call(case, request, given, problem, s)


def _window(s: Signature, case: Case) -> Any:
    if not s.int_window:
        return list(case.window)
    return case.window[0] + (1 if s.takes["window"] == "sliding_window" else 0)
