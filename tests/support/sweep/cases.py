"""Draw cases of attention around the edges of a kernel's blocks, and make their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels.serving import DTYPES, FORMS, drawn_blocks, in_pages, of_eight_bits
from tests.support.kernels.solving import MEMORY, normal, qkv, restrided

TYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("bhsd", "bhsd", "bshd", "thd")
FEATURES = (
    "causal", "top_left", "window", "left", "right", "offset", "offsets", "softcap", "scale", "dropout", "slopes",
    "own_slopes", "sinks", "bool_mask", "mask", "blocks", "q_lengths", "kv_lengths", "dlse", "memory", "sharp",
    "one_gradient", "given",
)  # fmt: skip
OF_COMMON = ("causal", "left", "softcap", "scale", "sinks", "eight_bits", "sharp")  # with a common prefix
OF_FORWARD = ("pages", "eight_bits")  # no gradient
NOT_PACKED = {"bool_mask", "mask", "blocks", "q_lengths", "kv_lengths"}
SHAPES = tuple((n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1) for n in range(16))  # of a mask; 0 is a dimension of size 1
OF_WINDOWS = ("", "", "", "mask", "mask", "blocks", "dropout", "slopes", "sinks", "dlse", "kv_lengths", "given")
SIDES = ("left", "window", "left", "right", "left")  # of the window of every third case
WIDE_DIMS = (257, 320, 512, 576)  # head dimensions above 256: gradients and forward have them up to 576
NOT_HUGE = {"slopes", "own_slopes", "mask", "eight_bits"}  # a huge score absorbs what is added to it
HUGE, TAME = 2.0**65, 4.0  # sizes of the elements of q and k in a huge case, and in one with nearly the same softmax
RESIDUES = 32  # the least block of keys; each residue occurs in RESIDUES windows one after another
GRADIENTS = ("dq", "dk", "dv", "dattn_mask", "dsinks")


@dataclass(frozen=True)
class Case:
    """One case as plain numbers: `tensors_of` makes its tensors from them alone."""

    dtype: str
    layout: str
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    dim: int
    value_dim: int
    seed: int
    features: frozenset[str]
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)  # choices that belong to the features


def edges(blocks: Sequence[int], longest: int) -> list[int]:
    """Return lengths around one, two and three blocks of each size; far more; and a few others."""
    near = {count * block + by for block in blocks for count in (1, 2, 3) for by in (-1, 0, 1)}
    return sorted(n for n in near | {1, 2, 5, 19, longest} if 0 < n <= longest)


def cases(
    count: int, q_lens: Sequence[int], kv_lens: Sequence[int], *, dims: Sequence[int] = (8, 16, 24, 40, 64),
    types: Sequence[str] = TYPES, of_forward: bool = True, extremes: bool = False, seed: int = 0,
) -> Iterator[Case]:  # fmt: skip
    """Yield `count` cases. Three kinds take turns, so that each has its share in any run.

    - Many queries and keys with a window and at most one more feature: its edge has each residue of a block in turn.
    - Each feature in turn, alone or with one more.
    - Any features together, also those that have no gradient.

    With `extremes`, an eighth of the cases has NaN or infinity in a row of a tensor, and another eighth products of q
    and k beyond float32's range: for kernels that keep NaN from rows that do not see it, and clamp products.
    """
    for number in range(count):
        random = Random(f"{seed} {number}")
        case = _case(random, *divmod(number, 3), q_lens, kv_lens, dims, types, of_forward)
        if extremes and number % 8 == 0 and "eight_bits" not in case.features:
            name = random.choice(("v", "v", "k", "q", "do"))
            value = random.choice((torch.nan, torch.inf, -torch.inf)) if name in ("v", "do") else torch.nan
            case = replace(
                case, features=case.features | {"not_finite"}, more=case.more | {"not_finite": (name, value)}
            )
        if extremes and number % 8 == 4 and case.dtype != "float16" and not case.features & NOT_HUGE:
            case = replace(case, features=case.features | {"huge"})
        yield case


def _case(
    random: Random, turn: int, kind: int, q_lens: Sequence[int], kv_lens: Sequence[int], dims: Sequence[int],
    types: Sequence[str], of_forward: bool,
) -> Case:  # fmt: skip
    def one_of(values: Sequence[Any]) -> Any:
        return values[random.randrange(len(values))]

    layout, q_len, kv_len, common = one_of(LAYOUTS), one_of(q_lens), one_of(kv_lens), False
    if kind == 0:
        q_len, kv_len = one_of(q_lens[len(q_lens) // 2 :]), one_of(kv_lens[len(kv_lens) // 2 :])
        chosen = {SIDES[turn % len(SIDES)], one_of(OF_WINDOWS), one_of(("", "", "offset", "top_left"))} - {""}
    elif kind == 1:
        chosen = (
            {FEATURES[turn % len(FEATURES)], one_of(FEATURES)} if one_of((0, 1)) else {FEATURES[turn % len(FEATURES)]}
        )
    else:
        names = FEATURES + (OF_FORWARD if of_forward and one_of((0, 1)) else ())
        chosen = set(random.sample(names, one_of((0, 2, 3, 4, 5, 6, 8, 10, 14))))
        if len(names) > len(FEATURES):
            chosen.add(one_of(OF_FORWARD))
        common = of_forward and one_of(range(4)) == 0  # few queries of sequences that begin with the same pages
    if common:
        q_len, kv_len = one_of((1, 1, 2, 3)), one_of(kv_lens[-len(kv_lens) // 4 :])
        chosen = {"pages", *chosen.intersection(OF_COMMON)}
    if kind != 2 and chosen & NOT_PACKED and layout == "thd":
        layout = "bshd"
    if layout == "thd":
        chosen -= NOT_PACKED
    for first, second in (
        ("bool_mask", "mask"), ("offset", "offsets"), ("slopes", "own_slopes"), ("offset", "top_left"),
        ("offsets", "top_left"),
    ):  # fmt: skip
        if first in chosen:
            chosen.discard(second)
    batch = 4 if common else one_of((1, 1, 2, 3, 5))
    dim = one_of(dims)
    shifts = range(-q_len - 2, kv_len + 3)
    options: dict[str, Any] = {"layout": layout}
    if "causal" in chosen:
        options["causal"] = True
    if "top_left" in chosen:
        options["causal_alignment"] = "top_left"
    if "softcap" in chosen:
        options["softcap"] = one_of((0.7, 2.5, 30.0))
    if "scale" in chosen:
        options["scale"] = one_of((0.3, -0.2, 0.0, 1.5))
    if "dropout" in chosen:
        options |= {"dropout_p": one_of((0.1, 0.4, 0.75)), "dropout_seed": random.getrandbits(64)}
    more: dict[str, Any] = {}
    aligned = 0 if "top_left" in chosen else kv_len - q_len
    if "offset" in chosen:
        aligned = more["offset"] = aligned + one_of(range(-40, 41)) if kind == 0 else one_of(shifts)
    if "offsets" in chosen:
        more["offset"] = [one_of(shifts) for _ in range(batch)]
    left, right = ("left" in chosen or "window" in chosen), ("right" in chosen or "window" in chosen)
    if left or right:
        sizes = range(kv_len + 2) if one_of((0, 1)) else range(min(kv_len + 2, RESIDUES))
        before, after = one_of(sizes), one_of(sizes)
        if kind == 0:  # query i sees keys from i + aligned - before to i + aligned + after
            further = RESIDUES * one_of((0, 0, 1))
            before, after = ((turn + sign * aligned) % RESIDUES + further for sign in (1, -1))
        options["window"] = (before if left else -1, after if right else -1)
    for name, length in (("q", q_len), ("kv", kv_len)):
        if layout == "thd" or f"{name}_lengths" in chosen or ("pages" in chosen and name == "kv"):
            least = (1 if name == "q" else 2 * length // 3) if common else 0  # the prefix has whole chunks
            more[f"{name}_lengths"] = [length, *(one_of(range(least, length + 1)) for _ in range(batch - 1))]
    if "bool_mask" in chosen or "mask" in chosen:
        more["mask_shape"] = one_of((SHAPES[-1], one_of(SHAPES)))
        more["mask_type"] = one_of(("own", "float32", "float64"))
        more["hidden"] = one_of((0.0, 0.3))
    if "blocks" in chosen:
        options["block_size"] = one_of(((16, 16), (16, 48), (32, 16)))
        more["lead"], more["share"] = one_of(("", "one", "heads", "sequences", "own")), one_of((0.1, 0.6))
    if "memory" in chosen:
        more["memory"] = {name: one_of((*MEMORY, "expanded")) for name in ("q", "k", "v", "do")}
    if "eight_bits" in chosen:
        more["kind"], more["form"] = one_of(tuple(DTYPES)), one_of(FORMS)
    if "pages" in chosen:
        more["strided"] = one_of((False, True))
        more["page"], more["shared"] = one_of((1, 7, 16, 32)), one_of((0, 1, 9))
        if common:
            more["page"], more["shared"] = one_of((16, 32)), kv_len
    if "one_gradient" in chosen:
        more["gradient"] = one_of(GRADIENTS)
    return Case(
        one_of(types), layout, batch, one_of((1, 2, 3)), one_of((1, 2, 3)), q_len, kv_len, dim, one_of((dim, *dims)),
        one_of(range(1 << 10)), frozenset(chosen), options, more,
    )  # fmt: skip


def tensors_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the options of a case. With `do`, the options name the gradients.

    Memory that no kernel may read, such as rows beyond a sequence's length, is NaN.
    """
    more, features, batch, layout = case.more, case.features, case.batch, case.layout
    heads, dtype, options = case.kv_heads * case.group, getattr(torch, case.dtype), dict(case.options)
    backward = not features.intersection(OF_FORWARD)
    t = qkv(batch, heads, case.q_len, case.kv_len, case.dim, kv_heads=case.kv_heads, value_dim=case.value_dim,
            dtype=dtype, seed=case.seed)  # fmt: skip
    if "sharp" in features:
        t["q"] *= 4
    if features & {"huge", "tame"}:  # rows of one number: every score is one of two, far apart
        for name in "qk":
            t[name] = torch.where(t[name][..., :1] < 0, -1.0, 1.0).to(dtype).expand_as(t[name]) * (
                HUGE if "huge" in features else TAME
            )
    if "not_finite" in features:
        name, number = more["not_finite"]
        t[name][0, :, case.seed % t[name].shape[2]] = number
    if not backward:
        del t["do"]
    lengths = {name: more.get(f"{name}_lengths") for name in ("q", "kv")}
    if layout == "thd":
        t = _packed(t, {name: found or [] for name, found in lengths.items()})
    else:
        for name, x in t.items():
            for b, length in enumerate(lengths["kv" if name in "kv" else "q"] or ()):
                x[b, :, length:] = torch.nan
        if layout == "bshd":
            t = {name: x.transpose(1, 2).contiguous() for name, x in t.items()}
        t |= {f"{name}_lengths": torch.tensor(found) for name, found in lengths.items() if found}
    page = more.get("page", 0)
    if "eight_bits" in features:
        for name in "kv":
            t[name] = t[name].nan_to_num()
        t = of_eight_bits(t, layout, more["kind"], more["form"], sequences=batch)
    if page:
        t = in_pages(t, layout, page, seed=case.seed, strided=more["strided"])
        _share(t, page, more["shared"])
    for name, memory in more.get("memory", {}).items():
        if name in t and t[name].itemsize > 1 and not (page and name in "kv"):
            t[name] = _expanded(t[name], layout) if memory == "expanded" else restrided(t[name], memory)
    if "offset" in more:
        t["offset"] = torch.tensor(more["offset"])
    if "slopes" in features or "own_slopes" in features:
        shape = (batch, heads) if "own_slopes" in features else (heads,)
        t["alibi_slopes"] = normal(*shape, seed=case.seed + 5).abs() / 4
    grads = ["dq", "dk", "dv"]
    if "sinks" in features:
        t["sinks"] = normal(heads, seed=case.seed + 1)
        grads.append("dsinks")
    if "dlse" in features and backward:
        rows = (heads, len(t["q"])) if layout == "thd" else (batch, heads, case.q_len)
        t["dlse"] = normal(*rows, seed=case.seed + 2)
    keys = -(-case.kv_len // page) * page if page else case.kv_len
    if "mask_shape" in more:
        sizes = (batch, heads, case.q_len, keys)
        numbers = normal(
            *(n if own else 1 for n, own in zip(sizes, more["mask_shape"], strict=True)), seed=case.seed + 3
        )
        if "bool_mask" in features:
            t["attn_mask"] = numbers > -0.7
        else:
            numbers = numbers.to(dtype if more["mask_type"] == "own" else getattr(torch, more["mask_type"]))
            if more["hidden"]:
                numbers[numbers < -0.7] = -torch.inf
            t["attn_mask"] = numbers
            grads.append("dattn_mask")
    if "blocks" in features:
        lead = {"one": (1,), "heads": (heads,), "sequences": (batch, 1), "own": (batch, heads)}.get(more["lead"], ())
        blocks = (-(-n // block) for n, block in zip((case.q_len, keys), options["block_size"], strict=True))
        t["block_mask"] = drawn_blocks(*lead, *blocks, seed=case.seed, share=more["share"])
    if backward:
        options["grads"] = [more["gradient"]] if more.get("gradient") in grads else grads
    return t, options


def _share(t: dict[str, Tensor], page: int, most: int) -> None:
    """Let sequences begin with the same pages, up to `most` of those that the first sequence and they have."""
    counts = [-(-length // page) for length in t["kv_lengths"].tolist()]
    for table, count in zip(t["block_table"], counts, strict=True):
        shared = min(count, counts[0], most)
        table[:shared] = t["block_table"][0, :shared]


def _packed(t: dict[str, Tensor], lengths: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the tensors in layout thd: the first rows of each sequence, as many as its length, one after another."""
    packed = {}
    for name, x in t.items():
        of = lengths["kv" if name in "kv" else "q"]
        packed[name] = torch.cat([x[b, :, :length].transpose(0, 1) for b, length in enumerate(of)]).contiguous()
    names = {"q": "q", "kv": "k"}
    return packed | {f"cu_seqlens_{names[n]}": torch.tensor([0, *of]).cumsum(0) for n, of in lengths.items()}


def _expanded(t: Tensor, layout: str) -> Tensor:
    """Return the first head for every head, by a stride of 0."""
    axis = 1 if layout == "bhsd" or layout == "thd" else 2
    return t.narrow(axis, 0, 1).expand(t.shape)
