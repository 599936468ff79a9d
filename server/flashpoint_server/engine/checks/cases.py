"""The problems of the check at an engine's start: every option alone and in pairs, and every way to cut the work.

Lengths are made from the block of the kernel under test: over two blocks of queries, and over three of keys. Numbers
are multiples of 1/32 below 4, which float16, bfloat16 and float32 all hold: so one exact answer serves all types.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from flashpoint_server.engine.checks.exact import Case

CHUNK = 1024  # keys of one softmax of the kernels in C: more keys are merged
OPTIONS = ("window", "softcap", "dropout", "alibi", "sinks", "mask", "bool_mask", "blocks", "lengths", "offset")
_APART = {frozenset(pair) for pair in (("mask", "bool_mask"), ("lengths", "offset"))}
_DIMS = ((16, 16), (24, 40), (64, 32), (8, 16), (40, 24), (32, 33))  # of q and k, and of v
_LAYOUTS = ("bhsd", "bshd", "thd")


class _Draw:
    """Reproducible numbers."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(67)

    def __call__(self, *shape: int) -> Tensor:
        t = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return t.mul_(32).round_().clamp_(-127, 127).div_(32).double()

    def true(self, *shape: int, share: float) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu") < share


def cases(queries: int, keys: int) -> Iterator[Case]:
    """Yield a problem without options, then one for each option and for each pair of options.

    `queries` and `keys` are the block of the kernel. Heads, dimensions, layouts and the residues of windows and offsets
    within a block change from case to case.
    """
    chosen: list[tuple[str, ...]] = [(), ("causal",), *((name,) for name in OPTIONS)]
    chosen += [pair for pair in combinations(OPTIONS, 2) if frozenset(pair) not in _APART]
    draw = _Draw()
    for number, names in enumerate(chosen):
        yield _case(draw, number, names, 2 * queries + 5 + number % 13, 3 * keys + 7 + number % 17, keys)


def compiled() -> Iterator[Case]:
    """Yield the problems of the kernels that a GPU compiles at the start: without options, and with a causal mask."""
    draw = _Draw()
    for dim in (64, 128):
        for causal, q_len, kv_len, heads in ((False, 261, 391, 2), (True, 300, 517, 4)):
            q, k, v = draw(1, heads, q_len, dim), draw(1, 2, kv_len, dim), draw(1, 2, kv_len, dim)
            do, name = draw(1, heads, q_len, dim), f"{'causal' if causal else 'plain'} {dim}"
            yield _made(name, q, k, v, do, {"causal": causal}, {}, [q_len], [kv_len], "bhsd", [])


def small() -> Case:
    """Return one small causal problem, for backends that take seconds for a large one."""
    draw = _Draw()
    q, k, v, do = draw(2, 4, 37, 16), draw(2, 2, 53, 16), draw(2, 2, 53, 16), draw(2, 4, 37, 16)
    return _made("small", q, k, v, do, {"causal": True}, {}, [37] * 2, [53] * 2, "bhsd", [])


def _case(draw: _Draw, number: int, names: tuple[str, ...], q_len: int, kv_len: int, block: int) -> Case:
    batch = 2 if "lengths" in names else 1
    if batch == 2:
        q_len, kv_len = q_len - q_len // 4, kv_len - kv_len // 4
    kv_heads, group = ((1, 2), (1, 1), (2, 1))[number % 3]
    heads, (dim, value_dim) = kv_heads * group, _DIMS[number % len(_DIMS)]
    layout = _LAYOUTS[number % 3]
    options: dict[str, Any] = {"causal": "causal" in names or number % 4 == 3}
    extra: dict[str, Tensor] = {}
    q_lengths, kv_lengths, offsets = [q_len] * batch, [kv_len] * batch, []
    if "lengths" in names:
        q_lengths[1], kv_lengths[1] = q_len - q_len // 3, kv_len - kv_len // 3
    if "offset" in names:
        offsets = [16 * number % block - 11 * (number % 3)]
    if "window" in names:
        options["window"] = (block + 16 * number % block + number % 3, -1 if options["causal"] else 3 * (number % 9))
    if "softcap" in names:
        options["softcap"] = 4.0
    if "dropout" in names:
        options |= {"dropout_p": 0.25, "dropout_seed": 1000 + number}
    if "alibi" in names:
        extra["alibi_slopes"] = draw(heads).abs() / 8
    if "sinks" in names:
        extra["sinks"] = draw(heads)
    if "mask" in names or "bool_mask" in names:
        layout = "bhsd" if layout == "thd" else layout
        shape = ((heads, q_len, kv_len), (1, q_len, kv_len), (heads, 1, kv_len))[number % 3]
        extra["attn_mask"] = draw(*shape) if "mask" in names else draw.true(*shape, share=0.6)
    if "blocks" in names:
        layout = "bhsd" if layout == "thd" else layout
        options["block_size"] = (16, 32)
        extra["block_mask"] = draw.true(1, heads, -(-q_len // 16), -(-kv_len // 32), share=0.5)
    q, k = draw(batch, heads, q_len, dim), draw(batch, kv_heads, kv_len, dim)
    v, do = draw(batch, kv_heads, kv_len, value_dim), draw(batch, heads, q_len, value_dim)
    return _made("+".join(names) or "plain", q, k, v, do, options, extra, q_lengths, kv_lengths, layout, offsets)


def _made(
    name: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, options: dict[str, Any], extra: dict[str, Tensor],
    q_lengths: list[int], kv_lengths: list[int], layout: str, offsets: list[int], **more: Any,
) -> Case:  # fmt: skip
    given = bool(offsets)
    offsets = offsets or [keys - queries for queries, keys in zip(q_lengths, kv_lengths, strict=True)]
    return Case(name, q, k, v, do, options, extra, offsets, q_lengths, kv_lengths, layout, given_offsets=given, **more)


def cuts(queries: int, keys: int) -> Iterator[Case]:
    """Yield the problems that the kernels in C cut in other ways: between sequences, chunks, parts and pages."""
    draw = _Draw()

    def made(
        name: str, batch: int, kv_heads: int, group: int, q_len: int, kv_len: int, dim: int, layout: str = "bhsd",
        options: dict[str, Any] | None = None, offsets: list[int] | None = None, gradients: bool = True,
        q_lengths: list[int] | None = None, kv_lengths: list[int] | None = None, **more: Any,
    ) -> Case:  # fmt: skip
        heads = kv_heads * group
        q, k, v = draw(batch, heads, q_len, dim), draw(batch, kv_heads, kv_len, dim), draw(batch, kv_heads, kv_len, 16)
        if common := more.get("forks", 0):
            k[1:, :, :common], v[1:, :, :common] = k[:1, :, :common], v[:1, :, :common]
        do = draw(batch, heads, q_len, 16) if gradients else None
        lengths = q_lengths or [q_len] * batch, kv_lengths or [kv_len] * batch
        return _made(name, q, k, v, do, options or {}, {}, *lengths, layout, offsets or [], **more)

    # Each sequence has another residue of (left − offset) within a block of keys, and three strips of queries.
    steps = range(0, keys, 16)
    residues = [step - 5 * (step // 16 % 2) for step in steps]
    yield made(
        "residues", len(residues), 1, 1, 105, keys + 45, 16, "thd", {"window": (keys // 2, 9)}, residues,
        q_lengths=[105 - 2 * n for n in range(len(residues))],
    )  # fmt: skip
    # Chunks of keys that two threads compute, and whose states are merged.
    for group, q_len, window in ((1, 3, (-1, -1)), (2, 1, (2 * CHUNK + 77, 0))):
        options = {"window": window}
        yield made("merge", 1, 1, group, q_len, 3 * CHUNK + 100, 64, "bhsd", options, gradients=False, threads=2)
    # Parts of at most 2,048 rows, whose gradients of keys are added: by one thread, and by two.
    for threads in (1, 2):
        yield made("parts", 1, 1, 8, 300, keys + 9, 16, "bshd", {"causal": True}, threads=threads)
    # Many short sequences, whose tasks are made at once.
    lengths = [1 + n % 5 for n in range(256)], [1 + n % 11 for n in range(256)]
    for layout in ("thd", "bhsd"):
        q_lengths, kv_lengths = lengths if layout == "thd" else (None, None)
        yield made(
            "sequences", 256, 1, 2, 5, 11, 16, layout, {"causal": layout == "bhsd"}, q_lengths=q_lengths,
            kv_lengths=kv_lengths, threads=2,
        )  # fmt: skip
    for causal in (False, True):
        yield made("8-bit keys", 1, 1, 2, 7, keys + 9, 16, "bhsd", {"causal": causal}, gradients=False, eight_bit=True)
    # Keys in pages, and sequences that begin with the same pages, which are read together.
    for pages in (16, 7):
        yield made(
            "pages", 3, 1, 2, 9, 150, 16, "bshd", {"causal": True}, gradients=False, kv_lengths=[150, 1, 77],
            pages=pages,
        )  # fmt: skip
    yield made(
        "shared prefix", 4, 1, 2, 3, 2 * CHUNK + 90, 16, "bshd", {"causal": True}, gradients=False, pages=16,
        forks=2 * CHUNK, kv_lengths=[2 * CHUNK + 90 - 7 * n for n in range(4)],
    )  # fmt: skip
