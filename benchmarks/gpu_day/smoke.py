"""Run a small problem with each kernel on this device, and check its answers against float64.

A check of gradients takes o and lse from the float64 reference, not from the forward kernel. So a wrong forward kernel
does not fail the checks of the gradients.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_day.device import Cuda
from benchmarks.gpu_day.plan import Smoke
from flashpoint_kernels import Options, Problem, quantize, run, verify
from flashpoint_kernels.nano import nano_attention
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.triton_backend.host import launch


@dataclass(frozen=True)
class Check:
    """A problem, and the kernels that must run for it."""

    kernels: tuple[str, ...]
    grads: tuple[str, ...] = ()  # empty: the check runs the forward
    hopper: bool = False
    stored: bool = False  # gradients store dS (FLASHPOINT_STORE_DS)
    two_sets: bool = False  # the forward for Hopper has two sets of descriptors (FLASHPOINT_TWO_SETS)
    split: bool = False  # few queries over many keys, which the kernels divide among programs
    pages: bool = False
    forks: bool = False  # all sequences share their pages of keys except the last page; each has one query
    keys: str | None = None  # the dtype of 8-bit keys and values
    mask: bool = False
    sinks: bool = False
    blocks: bool = False  # the check uses a block mask
    dims: tuple[int, int] | None = None  # head dimensions of keys and of values; None: that of `device.sizes.smoke`
    repeats: bool = False  # repeated runs must return the same bits
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})


_GRADIENTS = ("attention_delta", "attention_backward_kv", "attention_backward_q")
_GRADIENTS_HOPPER = ("attention_delta", "attention_backward_kv_hopper", "attention_backward_q_hopper")
_STORED_GENERAL = ("attention_delta", "attention_backward_kv", "attention_backward_q_stored")
_STORED = ("attention_delta", "attention_backward_kv_hopper", "attention_backward_q_stored_hopper")
_STORED_WIDE = (
    "attention_delta", "attention_backward_v_hopper", "attention_backward_k_stored_hopper",
    "attention_backward_q_stored_hopper",
)  # fmt: skip
_GRADS = ("dq", "dk", "dv")
_LEVEL_1: dict[str, Any] = {"window": (100, 20), "softcap": 5.0}
_BLOCKS: dict[str, Any] = {"causal": True, "block_size": (32, 32)}
CHECKS = {
    "forward": Check(("attention_forward",)),
    "forward_hopper": Check(("attention_forward_hopper",), hopper=True),
    "forward_two_sets_hopper": Check(("attention_forward_hopper",), hopper=True, two_sets=True),
    "backward_kv": Check(("attention_delta", "attention_backward_kv"), ("dk", "dv")),
    "backward_q": Check(("attention_delta", "attention_backward_q"), ("dq",)),
    "backward_kv_hopper": Check(("attention_delta", "attention_backward_kv_hopper"), ("dk", "dv"), hopper=True),
    "backward_q_hopper": Check(("attention_delta", "attention_backward_q_hopper"), ("dq",), hopper=True),
    "backward_stored": Check(_STORED_GENERAL, _GRADS, stored=True),
    "backward_stored_hopper": Check(_STORED, _GRADS, hopper=True, stored=True),
    "backward_wide_hopper": Check(_STORED_WIDE, _GRADS, hopper=True, stored=True, dims=(256, 256)),
    "merge": Check(("attention_forward", "merge_parts"), split=True),
    "packed_backward_q": Check(("attention_delta", "attention_backward_q"), ("dq",), split=True),
    "pages": Check(("attention_forward", "merge_parts"), split=True, pages=True),
    "forks": Check(("attention_cascade", "attention_forward", "merge_parts"), split=True, pages=True, forks=True),
    "int8": Check(("attention_forward", "merge_parts"), split=True, keys="int8"),
    "float8": Check(("attention_forward", "merge_parts"), split=True, keys="float8_e4m3fn"),
    "pages_many": Check(("attention_forward",), pages=True, keys="float8_e4m3fn"),
    "options": Check(("attention_forward",), options=_LEVEL_1, sinks=True),
    "mask": Check(("attention_forward",), mask=True),
    "backward_mask": Check(("attention_delta", "attention_backward_mask"), ("dattn_mask",), mask=True),
    "backward_sinks": Check(("attention_delta", "attention_backward_sinks"), ("dsinks",), sinks=True),
    "blocks": Check(("list_key_tiles", "attention_forward"), blocks=True, options=_BLOCKS),
    "backward_kv_blocks": Check(
        ("attention_delta", "list_query_tiles", "attention_backward_kv"), ("dk", "dv"), blocks=True, options=_BLOCKS
    ),
    "backward_q_blocks": Check(
        ("attention_delta", "list_key_tiles", "attention_backward_q"), ("dq",), blocks=True, options=_BLOCKS
    ),
    "wide": Check(("attention_forward",), dims=(192, 128)),
    "widest": Check(("attention_forward",), dims=(576, 512)),
    "widest_split": Check(("attention_forward", "merge_parts"), dims=(576, 512), split=True),
    "repeats_forward": Check(("attention_forward",), repeats=True),
    "repeats_backward": Check(_GRADIENTS, _GRADS, repeats=True),
    "repeats_forward_hopper": Check(("attention_forward_hopper",), hopper=True, repeats=True),
    "repeats_forward_two_sets_hopper": Check(("attention_forward_hopper",), hopper=True, two_sets=True, repeats=True),
    "repeats_backward_hopper": Check(_GRADIENTS_HOPPER, _GRADS, hopper=True, repeats=True),
    "repeats_backward_stored": Check(_STORED_GENERAL, _GRADS, stored=True, repeats=True),
    "repeats_backward_stored_hopper": Check(_STORED, _GRADS, hopper=True, stored=True, repeats=True),
    "float32": Check(("attention_forward",), dtype="float32"),
    "nano": Check(("nano_forward",)),
}


def smoke(device: Cuda, task: Smoke) -> dict[str, Any]:
    """Run a check; return `ok`, the kernels that ran, each error with its bound, and the answers that changed."""
    check = CHECKS[task.name]
    tensors = _tensors(device, check)
    with path_of_hopper(check.hopper, check.stored, check.two_sets):
        answers, ran, options = _nano(tensors) if task.name == "nano" else _launched(tensors, check)
        changed = _changed(tensors, options, answers, device.sizes.repeats) if check.repeats else []
    verdict = verify(tensors, options, answers=answers)
    missing = [name for name in check.kernels if name not in ran]
    ok = verdict.ok and not missing and not changed
    errors = {t.name: [t.max_abs, t.bound] for t in verdict.tensors}
    return {"ok": ok, "kernels": ran, "missing": missing, "changed": changed, "errors": errors}


def path_of_hopper(use_hopper: bool, stored: bool = False, two_sets: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which our Triton backend uses its kernels for Hopper, or else its general kernels.

    `stored`: gradients store dS; `two_sets`: its forward has two sets of descriptors.
    """
    switches = {
        "FLASHPOINT_HOPPER": use_hopper,
        "FLASHPOINT_STORE_DS": stored,
        "FLASHPOINT_TWO_SETS": two_sets,
    }
    return mock.patch.dict(os.environ, {name: str(int(on)) for name, on in switches.items()})


def _tensors(device: Cuda, check: Check) -> dict[str, Tensor]:
    """Return q, k, v and the other tensors of the check; with gradients also do, o and lse."""
    queries, keys, many, dim = device.sizes.smoke
    q_len, kv_len = (1 if check.forks else 5, many) if check.split else (queries, keys)
    dim, value_dim = check.dims or (dim, dim)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device.name, DTYPES[check.dtype])

    kv_heads = 4 if "nano_forward" in check.kernels else 2
    tensors = {"q": normal(2, 4, q_len, dim), "k": normal(2, kv_heads, kv_len, dim)}
    tensors["v"] = normal(2, kv_heads, kv_len, value_dim)
    if check.keys:
        for name in ("k", "v"):
            tensors[name], tensors[f"{name}_scale"] = quantize(tensors[name], DTYPES[check.keys])
    if check.pages:
        tensors = _in_pages(tensors, 16 if check.forks else 48)
    if check.forks:
        table = tensors["block_table"] = tensors["block_table"].cpu()  # kernels do not copy page numbers from a GPU
        table[1:, :-1] = table[:1, :-1]
    if check.mask:
        tensors["attn_mask"] = normal(2, 4, q_len, kv_len)
    if check.blocks:
        blocks = (-(-length // size) for length, size in zip((q_len, kv_len), check.options["block_size"], strict=True))
        tensors["block_mask"] = normal(2, 4, *blocks) > 0
    if check.sinks:
        tensors["sinks"] = normal(4).float()
    if check.grads:
        forward = Problem.create(tensors, Options(return_lse=True, **check.options))
        run([forward], "reference")
        tensors |= {"do": normal(2, 4, q_len, value_dim), **forward.outputs}
    return tensors


def _in_pages(tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the same keys and values in pages in random order; the last page of each sequence is not full."""
    k = tensors["k"]
    batch, _, length, _ = k.shape
    pages_per_sequence = -(-length // size)
    order = torch.randperm(batch * pages_per_sequence, generator=torch.Generator().manual_seed(1)).to(k.device)
    paged = dict(tensors)
    for name in ("k", "v", "k_scale", "v_scale"):
        if name in tensors:
            t = tensors[name].transpose(1, 2)
            bits = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
            pages = bits.new_zeros(batch * pages_per_sequence, size, *t.shape[2:])
            padded = bits.new_zeros(batch, pages_per_sequence * size, *t.shape[2:])
            padded[:, :length] = bits
            pages[order] = padded.unflatten(1, (pages_per_sequence, size)).flatten(0, 1)
            paged[name] = pages.view(t.dtype).transpose(1, 2)
    table = order.view(batch, pages_per_sequence).int()
    return paged | {"block_table": table, "kv_lengths": torch.full((batch,), length)}


def _launched(tensors: dict[str, Tensor], check: Check) -> tuple[dict[str, Tensor], list[str], Options]:
    """Return (answers, names of the kernels that ran, options). Memory is NaN at first, so unwritten answers show."""
    wanted: dict[str, Any] = {"grads": check.grads} if check.grads else {"return_lse": True}
    options = Options(**check.options, **wanted, backend="triton")
    direction = "backward" if check.grads else "forward"
    problem = Problem.create(tensors, options, direction, fixed_pages=not check.grads)
    for t in problem.outputs.values():
        t.fill_(float("nan"))
    run([problem], "triton")
    if check.grads:
        calls = launch.backward_calls([problem], [launch.scratch_of(problem)])
    else:
        calls = launch.forward_calls([problem])
    return problem.outputs, [call.kernel.__name__ for call in calls if call.programs], options


def _changed(tensors: dict[str, Tensor], options: Options, first: dict[str, Tensor], repeats: int) -> list[str]:
    """Run the problem `repeats` times, and return the names of answers whose bits changed."""
    problem = Problem.create(tensors, options, "backward" if "do" in tensors else "forward")
    changed: set[str] = set()
    for _ in range(repeats):
        for t in problem.outputs.values():
            t.fill_(float("nan"))
        run([problem], "triton")
        changed |= {name for name, t in problem.outputs.items() if not torch.equal(t, first[name])}
    return sorted(changed)


def _nano(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str], Options]:
    o, lse = nano_attention(tensors["q"], tensors["k"], tensors["v"], causal=True)
    return {"o": o, "lse": lse}, ["nano_forward"], Options(causal=True)
