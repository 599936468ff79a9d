"""Every backend gives the answers of docs/numerics.md at the limits of floating point."""

import math
from functools import lru_cache
from itertools import product

import pytest
import torch

from tests.conftest import DEVICE
from tests.support.kernels.extremes import ANSWERS, CASES, COLUMN, KEY, ONE, ROW, plain
from tests.support.kernels.solving import backward, forward, normal, qkv

# On CUDA, the backend `torch` calls torch's operators, which break some of these rules (docs/numerics.md).
BACKENDS = ["triton", *(["cpu"] if DEVICE == "cpu" else []), "tiled", "reference"]
EPS32 = torch.finfo(torch.float32).eps
HEAD = (0, 0)


def answers(backend, tensors, **options):
    return forward(backend, tensors, **options) | backward(backend, tensors, **options)


@lru_cache
def without_an_edge(backend, dtype):
    return answers(backend, plain(dtype))


@lru_cache
def with_zeros(backend, place):
    t = plain("float32")
    t[place][HEAD] = 0.0
    return answers(backend, t)


def near(answers, t):
    """Yield each answer's name, and a mask of its elements that equal the formula in float64, up to rounding.

    The formula is softmax(scale·q·kᵀ + mask)·v. A number outside the answer's dtype must be infinite.
    """
    q, k, v, do, mask = (t[name].double() for name in ("q", "k", "v", "do", "attn_mask"))
    scale = 1 / math.sqrt(q.shape[-1])
    s = scale * (q @ k.mT) + mask
    p = torch.softmax(s, -1)
    o, dp = p @ v, do @ v.mT
    ds = p * (dp - (do * o).sum(-1, keepdim=True))
    wanted = {"o": o, "lse": s.logsumexp(-1), "dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": p.mT @ do}
    # The rounding of a score also changes its exponential, and all products with this exponential.
    largest = {name: t[name].double().abs().amax((-1, -2), keepdim=True) for name in ("q", "k", "v", "do")}
    steep = (do.abs() @ v.abs().mT).amax((-1, -2), keepdim=True) * 2 * scale
    sizes = {"o": largest["v"], "lse": 1.0, "dq": steep * largest["k"], "dk": steep * largest["q"], "dv": largest["do"]}
    loose = 16 * EPS32 * (1 + s.abs().where(s.isfinite(), 0).amax((-1, -2), keepdim=True))
    for name, x in answers.items():
        info, want = torch.finfo(x.dtype), wanted[name]
        dims = (-1,) if name == "lse" else (-1, -2)
        rounding = 4 * info.eps * want.abs().amax(dims, keepdim=True) + info.smallest_normal
        allowed = rounding + (loose[..., 0] if name == "lse" else loose * sizes[name])
        x = x.double()
        beyond = (x == want.sign() * math.inf) & (want.abs() + allowed > info.max)
        yield name, ((x - want).abs() <= allowed) | beyond


def touched(word, name, t, value):
    """Return a mask of the elements that the extreme value changes by the effect `word`, a key of `extremes.WORDS`."""
    changed = torch.zeros(
        t["do" if name == "o" else "q" if name in ("lse", "dq") else name[1:]].shape, dtype=torch.bool
    )
    changed = changed[..., 0] if name == "lse" else changed
    head = changed[HEAD]
    if word.startswith("rows"):
        rows = t["q"][HEAD][:, COLUMN].cpu() * ONE[value] > 0
        assert rows.any()
        assert not rows.all()
        head[rows] = True
    if word.startswith("row") and not word.startswith("rows"):
        head[ROW] = True
    if "column" in word:
        head[:, COLUMN] = True
    if word.startswith("head"):
        head[:] = True
    return changed.to(DEVICE)


def check(word, name, backend, actual, t, case):
    if word in ("near", "unseen"):
        assert dict(near({name: actual}, t))[name].all(), name
        return
    if word == "equal":
        assert torch.equal(actual, with_zeros(backend, case.place)[name])
        return
    at = touched(word, name, t, case.value)
    bad = actual[at]
    if word.endswith("infinite"):
        assert bad.isinf().all()
    elif word.endswith("odd"):
        assert not bad.isfinite().any()
    elif word.endswith("up"):
        assert (bad.isnan() | (bad == math.inf)).all()
    else:
        assert bad.isnan().all()
    clean = without_an_edge(backend, "float32")[name]
    if not word.startswith("rows"):
        assert torch.equal(actual[~at], clean[~at])
        return
    assert torch.equal(actual[1:], clean[1:])
    assert torch.equal(actual[0, 1:], clean[0, 1:])
    other = {n: x.clone() for n, x in t.items()}
    other["k"][HEAD][KEY], other["attn_mask"][HEAD][:, KEY] = 0.0, -math.inf
    assert dict(near({name: actual}, other))[name][HEAD][~at[HEAD]].all()


# Interpreted cases are slow. Fast tests run only these, which have each changed input, each value and each effect.
INTERPRETED = (
    "NaN in q", "+∞ in k", "NaN in v", "+∞ in do", "−∞ in attn_mask", "1e4 in k", "subnormal in v", "−0 in q",
)  # fmt: skip


def in_wide_sweep():
    """Yield all cases. Interpreted cases that differ from others only in dtype or sign are marked full."""
    for backend in BACKENDS:
        for name, case in CASES.items():
            for dtype in case.dtypes:
                marks = []
                if backend == "triton":
                    if dtype != case.dtypes[0] or (case.value == "−∞" and case.place != "attn_mask"):
                        marks = [pytest.mark.full]
                    elif name not in INTERPRETED:
                        marks = [pytest.mark.slow]
                yield pytest.param(backend, name, dtype, marks=marks)


@pytest.mark.parametrize(("backend", "name", "dtype"), [*in_wide_sweep()])
def test_an_edge_gives_the_documented_answer(backend, name, dtype):
    case = CASES[name]
    t = case.tensors(dtype)
    actual = answers(backend, t)
    for answer, word in zip(ANSWERS, case.answers, strict=True):
        check(word, answer, backend, actual[answer], t, case)


# With fewer keys than a vector has elements, a backend may compute the maximum in another loop, which may lose NaN.


INTERPRETED_KEYS = {9: [], 1: [pytest.mark.slow], 8: [pytest.mark.slow]}


@pytest.mark.parametrize(
    ("backend", "keys", "place"),
    [
        pytest.param(*case, marks=INTERPRETED_KEYS.get(case[1], [pytest.mark.full]) if case[0] == "triton" else [])
        for case in product(BACKENDS, (1, 2, 4, 7, 8, 9, 17), ("q", "k"))
    ],
)
def test_a_nan_is_seen_among_few_keys_too(backend, keys, place):
    t = qkv(1, 2, 3, keys, 8)
    clean = answers(backend, t)
    t[place][0, 0, 0, 3] = math.nan
    actual = answers(backend, t)
    rows = slice(0, 1) if place == "q" else slice(None)
    for name in ("o", "lse", "dq"):
        assert actual[name][0, 0, rows].isnan().all(), name
        assert torch.equal(actual[name][0, 1], clean[name][0, 1])
        if place == "q":
            assert torch.equal(actual[name][0, 0, 1:], clean[name][0, 0, 1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [1, 3, 8, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_scores_that_all_are_minus_infinity_sees_no_key(backend, keys, causal):
    t = {name: x for name, x in qkv(1, 2, keys, keys, 8, dtype=torch.float32).items() if name != "do"}
    t["k"] = -t["k"].abs()
    clean = forward(backend, t, causal=causal)
    t["q"][0, 1, 0] = math.inf
    actual = forward(backend, t, causal=causal)
    assert not actual["o"][0, 1, 0].any()
    assert actual["lse"][0, 1, 0] == -math.inf
    assert torch.equal(actual["o"][0, 0], clean["o"][0, 0])
    assert torch.equal(actual["lse"][0, 0], clean["lse"][0, 0])


# Rows


@pytest.mark.parametrize(
    ("backend", "hidden"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case == ("triton", "float") else [])
        for case in product(BACKENDS, ("bool", "float"))
    ],
)
def test_a_fully_masked_row_is_nothing_and_the_others_are_as_without_it(backend, hidden):
    t = plain("float32")
    if hidden == "bool":
        t["attn_mask"] = torch.ones_like(t["attn_mask"], dtype=torch.bool)
    t["attn_mask"][HEAD][ROW] = False if hidden == "bool" else -math.inf
    actual = answers(backend, t)
    for name in ("o", "dq"):
        assert torch.equal(actual[name][HEAD][ROW], torch.zeros(16, device=DEVICE))
    assert actual["lse"][HEAD][ROW] == -math.inf
    rest = [i for i in range(5) if i != ROW]
    fewer = {n: x[:, :, rest] if n in ("q", "do", "attn_mask") else x for n, x in t.items()}
    for name, x in answers(backend, fewer).items():
        y = actual[name][:1, :1]
        y = y[:, :, rest] if name in ("o", "lse", "dq") else y
        torch.testing.assert_close(y, x[:1, :1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_one_key_is_that_keys_value(backend):
    """A query that sees one key has the bits of this key's value as o, the score as lse, and a dq of 0."""
    t = plain("float32")
    t["attn_mask"] = torch.ones_like(t["attn_mask"], dtype=torch.bool)
    t["attn_mask"][HEAD][ROW] = torch.arange(7, device=DEVICE) == KEY
    actual = answers(backend, t)
    assert torch.equal(actual["o"][HEAD][ROW], t["v"][HEAD][KEY])
    score = t["q"][HEAD][ROW] @ t["k"][HEAD][KEY] / 4
    torch.testing.assert_close(actual["lse"][HEAD][ROW], score, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(actual["dq"][HEAD][ROW], torch.zeros(16, device=DEVICE), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.full), *BACKENDS[1:]])
def test_rows_of_100_000_keys(backend):
    """Sums over 100,000 keys with weights of about 1e-5 have relative errors of at most 2e-6, as sums of few keys."""
    n = 100_000
    t = qkv(1, 1, 2, n, 16)
    t["attn_mask"] = normal(2, n, seed=5)
    actual = answers(backend, t)
    torch.testing.assert_close(actual["dv"].sum(2), t["do"].sum(2), rtol=1e-5, atol=1e-5)
    s = (t["q"].double() @ t["k"].double().mT) / 4 + t["attn_mask"].double()
    p, do, v = torch.softmax(s, -1), t["do"].double(), t["v"].double()
    o = p @ v
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / 4
    q, k, lse = t["q"].double(), t["k"].double(), s.logsumexp(-1)
    # Compare each error with the sum of the absolute terms: 100 000 terms of both signs nearly cancel.
    products = {"o": (p, v), "dq": (ds, k), "dk": (ds.mT, q), "dv": (p.mT, do)}
    for name, (a, b) in products.items():
        error, size = (actual[name].double() - a @ b).abs().max(), (a.abs() @ b.abs()).max()
        assert error <= 2e-6 * size, (name, error / size)
    torch.testing.assert_close(actual["lse"].double(), lse, rtol=2e-6, atol=0)
    t["q"].zero_()
    t["attn_mask"].zero_()
    even = forward(backend, t)
    torch.testing.assert_close(even["lse"], torch.full_like(even["lse"], math.log(n)), rtol=1e-6, atol=0)
    torch.testing.assert_close(even["o"], t["v"].mean(2, keepdim=True).expand(-1, -1, 2, -1), rtol=0, atol=1e-6)
