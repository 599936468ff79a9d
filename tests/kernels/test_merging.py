"""`merge` of answers to parts of the keys equals attention to all keys and the SDK's merge, also in ring attention."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint._shards.spans import Queries, merged
from flashpoint_kernels import ProblemError, attention, available_backends, merge
from tests.conftest import DEVICE
from tests.support.covering import cover
from tests.support.kernels.solving import normal
from tests.support.sockets import free_port

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = [name for name in ("triton", "cpu", "tiled", "reference") if name in available_backends(DEVICE)]
NAMES = ("q", "k", "v", "attn_mask", "sinks")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "mask": {"attn_mask": True},
    "mask and sinks": {"attn_mask": True, "sinks": True}, "a row without keys": {"attn_mask": "row 2 sees nothing"},
}  # fmt: skip
CUTS = {"two": (5,), "three": (1, 8), "one": (), "one without keys": (5, 5)}


def inputs(dtype: torch.dtype, mask: object, sinks: bool) -> dict[str, Tensor]:
    t = {"q": normal(2, 4, 6, 8), "k": normal(2, 2, 11, 8, seed=1), "v": normal(2, 2, 11, 16, seed=2)}
    t = {name: x.to(dtype) for name, x in t.items()}
    if mask:
        t["attn_mask"] = normal(2, 1, 6, 11, seed=3).to(dtype)
        if mask is not True:
            t["attn_mask"][:, :, 2] = float("-inf")
    if sinks:
        t["sinks"] = normal(4, seed=4).to(dtype)
    return {name: x.requires_grad_() for name, x in t.items()}


def in_parts(t: dict[str, Tensor], cut: tuple[int, ...], layout: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return attention merged from the key ranges that `cut` separates; the first range has the sinks."""
    bounds = [0, *cut, t["k"].shape[2]]
    parts = []
    for n, (first, behind) in enumerate(itertools.pairwise(bounds)):
        part: dict[str, Any] = {"q": t["q"], "k": t["k"][:, :, first:behind], "v": t["v"][:, :, first:behind]}
        part["sinks"] = None if n else t.get("sinks")
        if "attn_mask" in t:
            part["attn_mask"] = t["attn_mask"][..., first:behind]
        if layout == "bshd":
            part |= {name: part[name].transpose(1, 2) for name in "qkv"}
        parts.append(attention(**part, layout=layout, return_lse=True, **options))
    o, lse = merge([o for o, _ in parts], [lse for _, lse in parts], layout=layout)
    return (o.transpose(1, 2) if layout == "bshd" else o), lse


@cover(backend=BACKENDS, options=OPTIONS, cut=CUTS, layout=["bhsd", "bshd"])
def test_parts_merge_to_the_whole_forward_and_backward(
    backend: str, options: dict[str, Any], cut: tuple[int, ...], layout: str
) -> None:
    how = {name: value for name, value in options.items() if name == "softcap"}
    mask, sinks = options.get("attn_mask"), bool(options.get("sinks"))
    dtype = torch.float64 if backend == "reference" else torch.float32
    t = inputs(dtype, mask, sinks)
    o, lse = in_parts(t, cut, layout, backend=backend, **how)
    exact = {name: x.detach().double().requires_grad_() for name, x in t.items()}
    truth, true_lse = attention(**exact, return_lse=True, backend="reference", **how)
    do, dlse = normal(*o.shape, seed=7), normal(*lse.shape, seed=8)
    dlse[true_lse.isneginf()] = 0
    actual = torch.autograd.grad((o, lse), list(t.values()), (do.to(dtype), dlse))
    expected = torch.autograd.grad((truth, true_lse), list(exact.values()), (do.double(), dlse))
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    for one, other in zip((o, lse, *actual), (truth, true_lse, *expected), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_merged_in_float32(dtype: torch.dtype) -> None:
    """Parts in 16 bits are merged in float32, so the merge adds only one rounding to those of the parts."""
    t = inputs(dtype, None, False)
    o, lse = in_parts(t, (3, 7), "bhsd")
    truth, true_lse = attention(*(x.detach().double() for x in t.values()), return_lse=True, backend="reference")
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), truth, rtol=0, atol=2 * torch.finfo(dtype).eps * truth.abs().max().item())
    torch.testing.assert_close(lse, true_lse, rtol=1e-2, atol=1e-2)
    (dq,) = torch.autograd.grad(o.float().sum(), t["q"])
    assert dq.dtype == dtype


@pytest.mark.parametrize(("shape", "layout"), [((5, 8), "bhsd"), ((3, 5, 8), "bhsd"), ((3, 5, 8), "bshd")])
def test_one_head(shape: tuple[int, ...], layout: str) -> None:
    q, k = normal(*shape), normal(*shape[:-2], 9, 8, seed=1)
    parts = [attention(q, x, x, layout=layout, return_lse=True) for x in (k[..., :4, :], k[..., 4:, :])]
    o, lse = merge(*zip(*parts, strict=True), layout=layout)
    whole = attention(q, k, k, layout=layout, return_lse=True)
    torch.testing.assert_close((o, lse), whole, rtol=1e-5, atol=1e-5)


def test_packed_sequences() -> None:
    q, k = normal(7, 2, 8), normal(9, 2, 8, seed=1)
    cu = {"cu_seqlens_q": [0, 3, 7]}
    # Each part has keys of both sequences, whose keys are [0, 4) and [4, 9).
    first, second = torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7, 8])
    parts = [
        attention(q, k[keys], k[keys], layout="thd", cu_seqlens_k=ends, return_lse=True, **cu)
        for keys, ends in ((first, [0, 2, 4]), (second, [0, 2, 5]))
    ]
    whole = attention(q, k, k, layout="thd", cu_seqlens_k=[0, 4, 9], return_lse=True, **cu)
    torch.testing.assert_close(merge(*zip(*parts, strict=True), layout="thd"), whole, rtol=1e-5, atol=1e-5)


def test_parts_without_keys_are_zero_and_have_no_gradient() -> None:
    q, k = normal(1, 2, 3, 8).requires_grad_(), normal(1, 2, 0, 8).requires_grad_()
    parts = [attention(q, k, k, return_lse=True) for _ in range(2)]
    o, lse = merge(*zip(*parts, strict=True))
    assert not o.any()
    assert lse.isneginf().all()
    (o.sum() + lse.exp().sum()).backward()
    assert not q.grad.any()  # type: ignore[union-attr]


def test_large_scores_do_not_overflow_and_merges_are_merged_again() -> None:
    outputs = [normal(1, 1, 4, 8, seed=n) for n in range(3)]
    lses = [normal(1, 1, 4, seed=n) * 1e4 for n in range(3)]
    flat = merge(outputs, lses)
    assert all(t.isfinite().all() for t in flat)
    first = merge(outputs[:2], lses[:2])
    torch.testing.assert_close(merge([first[0], outputs[2]], [first[1], lses[2]]), flat, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradgradcheck warns that lse is float32
def test_second_derivatives() -> None:
    outputs = [normal(1, 1, 2, 3, seed=n).double().requires_grad_() for n in range(2)]
    lses = [normal(1, 1, 2, seed=n).requires_grad_() for n in range(2)]

    def of(*t: Tensor) -> tuple[Tensor, Tensor]:
        return merge(t[:2], t[2:])

    assert torch.autograd.gradgradcheck(of, (*outputs, *lses), eps=1e-2, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"attn_mask": True}], ids=str)
def test_the_sdk_merges_the_same_parts_to_the_same(options: dict[str, bool]) -> None:
    """The SDK merges the same parts to the same result; it merges in numpy, and adds the sinks itself."""
    keywords = {"sinks": normal(2, seed=4)} if options.get("sinks") else {}
    keywords |= {"attn_mask": normal(5, 11, seed=3)} if options.get("attn_mask") else {}
    q, k, v = normal(1, 2, 5, 8).cpu(), normal(1, 2, 11, 8, seed=1).cpu(), normal(1, 2, 11, 16, seed=2).cpu()
    call = Queries.of(q.numpy(), {name: t.cpu().numpy() for name, t in keywords.items()})
    answers, parts = [], []
    for question in call.questions(11, [(0, 4), (4, 5), (5, 11)]):
        span = slice(*question.keys)
        given = {n: torch.tensor(t) if n == "attn_mask" else t for n, t in question.keywords.items()}
        o, lse = attention(q, k[:, :, span], v[:, :, span], **given)
        answers.append((question, o.numpy(), lse.numpy()))
        if not parts and "sinks" in keywords:
            given |= {"sinks": keywords["sinks"].cpu()}
        parts.append(attention(q, k[:, :, span], v[:, :, span], **given))
    ours = merge(*zip(*parts, strict=True))
    theirs = merged(call, answers, 16)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, torch.from_numpy(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], []), "lses: must be as many as outputs, at least 1, not 0 for 0"),
        (([torch.zeros(1, 2, 3, 8)], []), "not 0 for 1"),
        (([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)], [torch.zeros(2, 3)] * 2), r"outputs\[1\]: is \[2, 4, 8\]"),
        (([torch.zeros(3, 8), torch.zeros(3, 8).half()], [torch.zeros(3)] * 2), r"outputs\[1\]: .*float16"),
        (([torch.zeros(1, 2, 3, 8)], [torch.zeros(1, 3, 2)]), r"lses\[0\]: must be \[1, 2, 3\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(given: tuple[list[Tensor], list[Tensor]], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        merge(*given)
    with pytest.raises(ProblemError, match="must be bhsd, bshd or thd, not 'bhs'"):
        merge(*given, layout="bhs")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_of_processes_computes_what_one_does(world: int) -> None:
    """examples/ring_attention.py on several processes gives the result of one process, forward and backward."""
    port = str(free_port())
    processes = []
    for rank in range(world):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, ROOT / "examples/ring_attention.py"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        (largest,) = re.findall(rf"process {rank} of {world}: o, dq, dk, dv differ by at most (\S+)", output)
        assert float(largest) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_a_part_without_keys_adds_nothing_whatever_its_o_is(layout: str, dtype: torch.dtype) -> None:
    """Memory of a part that saw no key may have any bits."""
    shape = (5, 3, 8) if layout == "thd" else (2, 5, 3, 8) if layout == "bshd" else (2, 3, 5, 8)
    lse_shape = (3, 5) if layout == "thd" else (2, 3, 5)
    outputs = [normal(*shape, seed=n).to(dtype) for n in range(3)]
    lses = [normal(*lse_shape, seed=n) for n in range(3)]
    lses[1][..., 2:] = -torch.inf
    lses[2][:] = -torch.inf
    empty = [(lse if layout == "bhsd" else lse.transpose(-1, -2))[..., None].isneginf() for lse in lses]
    given = [t.masked_fill(none, torch.nan).requires_grad_() for t, none in zip(outputs, empty, strict=True)]
    zeroed = [t.masked_fill(none, 0.0).requires_grad_() for t, none in zip(outputs, empty, strict=True)]
    of_lses = [lse.requires_grad_() for lse in lses]
    actual, expected = merge(given, of_lses, layout=layout), merge(zeroed, of_lses, layout=layout)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    gradients = torch.autograd.grad(actual[0].sum() + actual[1][..., :2].sum(), [*given, *of_lses])
    wanted = torch.autograd.grad(expected[0].sum() + expected[1][..., :2].sum(), [*zeroed, *of_lses])
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_parts_without_keys_alone_give_zero() -> None:
    o, lse = merge([torch.full((2, 3, 4), torch.nan, device=DEVICE)], [torch.full((2, 3), -torch.inf, device=DEVICE)])
    assert not o.any()
    assert lse.isneginf().all()
