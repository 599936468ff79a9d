"""Make the problems of a case in the data type and layout of a request, and compare answers with the exact ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_kernels import Problem
from flashpoint_server.engine.checks.exact import Case

# Bounds of the error, as parts of the largest value of an answer.
BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_SIGNED = ("q", "k", "v", "o")  # if all of these change their signs, o does, and lse and the gradients do not


def forward_of(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """Return the forward of a case, in a data type of q, k and v."""
    return Problem.create(_given(case, "qkv", dtype, device), _options(case, return_lse=True), fixed_pages=True)


def backward_of(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """Return the gradients of a case. They start from the exact o and lse, so a fault of a forward does not show."""
    given = _given(case, ("q", "k", "v", "do"), dtype, device)
    given["o"] = _laid(case, "o", case.answers["o"]).to(device, dtype)
    given["lse"] = _laid(case, "lse", case.answers["lse"]).to(device, torch.float32)
    grads = tuple(name for name in case.answers if name.startswith("d"))
    return Problem.create(given, _options(case, grads=grads), "backward")


def change_signs(problem: Problem) -> None:
    """Write other numbers into the problem's tensors. The exact answers are the same but for the sign of o."""
    for name in problem.tensors.keys() & set(_SIGNED):
        problem.tensors[name].neg_()
    for t in problem.outputs.values():
        t.fill_(torch.nan)


def errors(case: Case, problem: Problem, *, changed: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the error of each answer, as a part of its bound: above 1 it is wrong. `changed`: after `change_signs`."""
    for name, answer in problem.outputs.items():
        exact, ours = _laid(case, name, case.answers[name]), answer.cpu().double()
        if changed and name == "o":
            exact = -exact
        finite = exact.masked_fill(exact.isinf(), 0.0)
        size = case.sink_terms if name == "dsinks" else finite.abs().max().item()
        dtype = answer.dtype if name == "lse" else problem.tensors["q"].dtype
        bound = BOUNDS[dtype] * max(size, 1.0)
        off = (ours - exact).abs().masked_fill(ours == exact, 0.0)
        yield name, off.nan_to_num(nan=torch.inf).max().item() / bound


def _options(case: Case, **more: object) -> Options:
    return Options(layout=case.layout, **case.options, **more)  # type: ignore[arg-type]


def _given(case: Case, names: Iterable[str], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for name in names:
        t: Tensor = getattr(case, name)
        laid = _paged(case, t) if case.pages and name in "kv" else _laid(case, name, t)
        if case.eight_bit and name in "kv":
            given[f"{name}_scale"] = torch.full(laid.shape[:-1], 1 / 32, dtype=torch.float32, device=device)
            given[name] = (laid * 32).to(device, torch.int8)
        else:
            given[name] = laid.to(device, dtype)
    for name, t in case.extra.items():
        given[name] = t.to(
            device, t.dtype if t.dtype == torch.bool else dtype if name == "attn_mask" else torch.float32
        )
    if case.given_offsets:
        given["offset"] = torch.tensor(case.offsets, dtype=torch.int64, device="cpu")
    queries, keys = (
        torch.tensor(lengths, dtype=torch.int64, device="cpu") for lengths in (case.q_lengths, case.kv_lengths)
    )
    if case.layout == "thd":
        given |= {f"cu_seqlens_{side}": _edges(t) for side, t in (("q", queries), ("k", keys))}
    elif case.pages:
        given |= {"block_table": _table(case).to(device), "kv_lengths": keys}
    elif len(set(case.q_lengths)) > 1:
        given |= {"q_lengths": queries, "kv_lengths": keys}
    return given


def _edges(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _laid(case: Case, name: str, t: Tensor) -> Tensor:
    """Return a tensor of a case, (B, H, S, …), in the case's layout."""
    of_keys, of_queries = name in ("k", "v", "dk", "dv"), name in ("q", "do", "o", "lse", "dq")
    if case.layout == "bhsd" or not (of_keys or of_queries) or (name == "lse" and case.layout == "bshd"):
        return t
    if case.layout == "bshd":
        return t.transpose(1, 2).contiguous()
    lengths = torch.tensor(case.kv_lengths if of_keys else case.q_lengths, dtype=torch.int64, device="cpu")
    valid = torch.arange(t.shape[2], dtype=torch.int64, device="cpu") < lengths[:, None]
    rows = t.transpose(1, 2)[valid]
    return rows.T.contiguous() if name == "lse" else rows


def _table(case: Case) -> Tensor:
    """Return the page numbers, (B, pages): forks begin with the same pages, and pages follow in descending order."""
    count, common = -(-case.k.shape[2] // case.pages), case.forks // case.pages
    table = torch.arange(len(case.kv_lengths) * count, dtype=torch.int32, device="cpu").flip(0).view(-1, count)
    table[:, :common] = table[0, :common].clone()
    return table


def _paged(case: Case, t: Tensor) -> Tensor:
    """Return k or v as pages (pages, page size, H, D), as the layout bshd has them."""
    table, (batch, heads, keys, dim) = _table(case), t.shape
    padded = torch.nn.functional.pad(t, (0, 0, 0, table.shape[1] * case.pages - keys))
    pool = padded.new_zeros(table.numel(), case.pages, heads, dim)
    pool[table.flatten().long()] = padded.view(batch, heads, -1, case.pages, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return pool
