"""The reference equals the contract's formula in explicit loops, and its gradients equal finite differences."""

import math

import numpy as np
import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.reference_backend import formula
from tests.support.kernels.made import Made
from tests.support.kernels.solving import backward, forward, normal, qkv
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of


def by_loops(t: dict[str, np.ndarray], options: Options, b: int, h: int, i: int) -> tuple[np.ndarray, float]:
    """Return one row of o and its lse, computed one scalar at a time in layout bhsd; dropout has a test of its own."""
    q_len, kv_len = t["q"].shape[2], t["k"].shape[2]
    if "q_lengths" in t:
        q_len, kv_len = int(t["q_lengths"][b]), int(t["kv_lengths"][b])
    kv_head = h // (t["q"].shape[1] // t["k"].shape[1])
    offset = kv_len - q_len if options.causal_alignment == "bottom_right" else 0
    left, right = options.window
    weights = [math.exp(t["sinks"][h])] if "sinks" in t else []
    total, o = math.fsum(weights), np.zeros(t["v"].shape[3])
    if i >= q_len:
        return o, -math.inf
    for j in range(kv_len):
        s = float(t["q"][b, h, i] @ t["k"][b, kv_head, j]) / math.sqrt(t["q"].shape[3])
        if options.softcap:
            s = options.softcap * math.tanh(s / options.softcap)
        if "alibi_slopes" in t:
            s -= t["alibi_slopes"][h] * abs(i + offset - j)
        if "attn_mask" in t:
            m = np.broadcast_to(t["attn_mask"], (*t["q"].shape[:3], t["k"].shape[2]))[b, h, i, j]
            if m.dtype == bool and not m:
                continue
            s += 0.0 if m.dtype == bool else float(m)
        if (options.causal and j > i + offset) or (left >= 0 and j < i + offset - left):
            continue
        if right >= 0 and j > i + offset + right:
            continue
        total += math.exp(s)
        o += math.exp(s) * t["v"][b, kv_head, j]
    return (o / total, math.log(total)) if total else (o, -math.inf)


LEVELS = [
    {},
    {"band": "causal"},
    {"band": "top_left"},
    {"band": "window"},
    {"softcap": 3.0},
    {"alibi": True},
    {"mask": "bool"},
    {"mask": "heads"},
    {"sinks": True},
    {"lengths": True},
    {"group": 2, "dims": (24, 40)},
    {"band": "window", "softcap": 3.0, "alibi": True, "mask": "keys", "sinks": True, "lengths": True, "group": 2},
]


@pytest.mark.parametrize("case", [PLAIN | level for level in LEVELS], ids=name_of)
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 33), (31, 7)])
def test_forward_is_the_contracts_formula(case: dict[str, object], q_len: int, kv_len: int) -> None:
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors_of(case, q_len, kv_len).items()}
    del tensors["do"]
    options = options_of(case, return_lse=True)
    problem = Problem.create(tensors, options)
    formula.forward([problem])
    arrays = {name: t.cpu().numpy() for name, t in tensors.items()}
    o, lse = (problem.outputs[name].cpu().numpy() for name in ("o", "lse"))
    for b, h, i in np.ndindex(o.shape[:3]):
        row, total = by_loops(arrays, options, b, h, i)
        np.testing.assert_allclose(o[b, h, i], row, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse[b, h, i], total, rtol=1e-6)  # lse is float32


@pytest.mark.parametrize("case", [PLAIN | level for level in [*LEVELS, {"dropout": True}]], ids=name_of)
def test_gradients_are_those_of_finite_differences(case: dict[str, object]) -> None:
    """Gradients of o and lse pass gradcheck in float64; with causal, 5 queries and 4 keys, a row sees no key."""
    case = case | {"dims": (3, 2)} | ({"mask": "full"} if case["mask"] == "heads" else {})
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors_of(case, 5, 4).items()}
    del tensors["do"]
    problem = Problem.create(tensors, options_of(case, return_lse=True))
    leaves = [n for n in ("q", "k", "v", "attn_mask", "sinks") if n in tensors and tensors[n].is_floating_point()]

    def solve(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(leaves, values, strict=True))
        answers: list[torch.Tensor] = []
        for row, x in problem.sequences():
            sequence = {n: given[n][row.batch] for n in ("q", "k", "v")}
            sequence["q"] = sequence["q"][:, : row.q_len]
            sequence |= {n: sequence[n][:, : row.kv_len] for n in ("k", "v")}
            if "attn_mask" in tensors:
                sequence["attn_mask"] = problem.mask_part(given.get("attn_mask", tensors["attn_mask"]), [row])[0]
            if "alibi_slopes" in x:
                sequence["alibi_slopes"] = x["alibi_slopes"].double()
            if "sinks" in given:
                sequence["sinks"] = given["sinks"]
            o, lse = formula.attend(problem, row, sequence, range(row.q_len))
            answers += [o, lse.masked_fill(lse == -math.inf, 0.0)]  # gradcheck cannot subtract infinities
        return tuple(answers)

    assert torch.autograd.gradcheck(solve, [tensors[n].requires_grad_() for n in leaves], fast_mode=True)


def test_backward_is_autograd_through_the_whole_problem() -> None:
    """Gradients of the whole batch equal autograd's, with dlse and with a mask and sinks that both sequences share."""
    t = {name: x.double() for name, x in qkv(2, 4, 6, 9, 5, kv_heads=2).items()}
    mask, sinks, dlse = normal(4, 1, 9).double(), normal(4).double(), normal(2, 4, 6).double()
    grads = ["dq", "dk", "dv", "dattn_mask", "dsinks"]
    actual = backward("reference", t | {"attn_mask": mask, "sinks": sinks, "dlse": dlse}, grads=grads)
    leaves = [x.clone().requires_grad_() for x in (t["q"], t["k"], t["v"], mask, sinks)]
    q, k, v, m, z = leaves
    s = q @ k.repeat_interleave(2, 1).mT / math.sqrt(5) + m
    lse = torch.logsumexp(torch.cat([s, z[:, None, None].expand(2, 4, 6, 1)], -1), -1)
    o = torch.exp(s - lse[..., None]) @ v.repeat_interleave(2, 1)
    expected = torch.autograd.grad((o * t["do"]).sum() + (lse * dlse).sum(), leaves)
    for name, grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual[name], grad, rtol=1e-12, atol=1e-12)


def test_any_head_dimension_and_float64() -> None:
    t = {name: x.double() for name, x in qkv(1, 1, 3, 4, 300, value_dim=700).items()}
    o = forward("reference", t)["o"]
    expected = torch.softmax(t["q"] @ t["k"].mT / math.sqrt(300), -1) @ t["v"]
    assert o.dtype == torch.float64
    torch.testing.assert_close(o, expected, rtol=1e-13, atol=1e-13)


def test_o_and_lse_of_the_caller_do_not_matter() -> None:
    t = qkv(1, 2, 5, 6, 8)
    wrong = {"o": torch.full_like(t["do"], 7.0), "lse": normal(1, 2, 5)}
    alone, beside = backward("reference", t), backward("reference", t | wrong)
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


@pytest.mark.parametrize(
    "mask", [None, (4, 31, 20), (31, 20), (1, 1, 20), (4, 31, 1)], ids=lambda shape: "x".join(map(str, shape or ()))
)
def test_a_long_sequence_is_taken_some_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch, mask: tuple[int, ...] | None
) -> None:
    """Chunks of two queries and one chunk of all queries give equal answers and gradients, up to float64 rounding."""
    t = {name: x.double() for name, x in qkv(2, 4, 31, 20, 5, kv_heads=2).items()}
    t |= {"sinks": normal(4).double(), "alibi_slopes": normal(4).double()}
    grads = ["dq", "dk", "dv", "dsinks"]
    if mask is not None:
        t["attn_mask"] = normal(*mask).double()
        grads.append("dattn_mask")
    options = {"causal": True, "window": (9, -1), "dropout_p": 0.25, "dropout_seed": 3}
    results = []
    for scores in (2 * 4 * 20, formula.CHUNK):
        monkeypatch.setattr(formula, "CHUNK", scores)
        dlse = normal(2, 4, 31, seed=5).double()
        results.append(
            forward("reference", t, **options) | backward("reference", t | {"dlse": dlse}, grads=grads, **options)
        )
    for name, whole in results[1].items():
        torch.testing.assert_close(results[0][name], whole, atol=1e-14, rtol=1e-13)


def test_what_is_materialised_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    t = {name: x.double() for name, x in qkv(1, 1, 1024, 1024, 16).items()}
    matrix = 1024 * 1024 * 8
    monkeypatch.setattr(formula, "CHUNK", 1 << 14)  # an eighth of a MiB; the whole matrix has 8 MiB
    for solve in (forward, backward):
        with Made() as made:
            solve("reference", t)
        assert 0 < made.largest < matrix / 32
