"""The oracle of the tests agrees with closed forms, torch's own attention and differences of its forward."""

import math

import pytest
import torch

from flashpoint_kernels import attention, attention_backward
from tests.support.oracle import answer, philox4x32_10

INF = math.inf


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def same(actual, expected, bound=1e-13):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, check_stride=False)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (1 << 64) - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)  # fmt: skip
def test_the_random_words_are_those_that_the_authors_of_philox_publish(counter, seed, words):
    assert [f"{int(word):08x}" for word in philox4x32_10(counter, seed)] == words.split()


def test_equal_scores_give_the_mean_of_the_visible_values():
    q, k, v = torch.zeros(1, 1, 3, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 2)
    got = answer({"q": q, "k": k, "v": v}, {"causal": True})  # bottom right: rows see 3, 4 and 5 keys
    same(got["lse"][0, 0], [math.log(n) for n in (3, 4, 5)])
    same(got["o"][0, 0], torch.stack([v[0, 0, :n].mean(0) for n in (3, 4, 5)]))
    same(got["key_weights"][0, 0], [1 / 3 + 1 / 4 + 1 / 5] * 3 + [1 / 4 + 1 / 5, 1 / 5])
    got = answer({"q": q, "k": k, "v": v}, {"causal": True, "causal_alignment": "top_left", "window": [1, 7]})
    same(got["lse"][0, 0], [math.log(n) for n in (1, 2, 2)])
    got = answer({"q": q, "k": k, "v": v, "offset": -1}, {"window": [-1, 0]})
    same(got["lse"][0, 0], [-INF, 0, math.log(2)])
    same(got["o"][0, 0], torch.stack([torch.zeros(2).double(), v[0, 0, 0], v[0, 0, :2].mean(0)]))


def test_each_option_has_the_effect_that_its_sentence_names():
    q, k, v = (torch.ones(n, 1) for n in (2, 3, 3))
    alibi = answer({"q": q, "k": k, "v": v, "alibi_slopes": torch.tensor([2.0]).double().log()}, {"scale": 0.0})
    same(alibi["lse"], [math.log(1 / 2 + 1 + 1 / 2), math.log(1 / 4 + 1 / 2 + 1)])  # query 0 is at key 1
    capped = answer({"q": 3 * q, "k": k, "v": v}, {"softcap": 2.0, "scale": 5.0})
    same(capped["lse"], [2 * math.tanh(7.5) + math.log(3)] * 2)
    mask = torch.tensor([[0.0, -INF, math.log(3)]], dtype=torch.float64)
    masked = answer({"q": q, "k": k, "v": torch.arange(3)[:, None] + 1.0, "attn_mask": mask}, {"scale": 0.0})
    same(masked["o"], [[1 / 4 + 3 * 3 / 4]] * 2)
    sink = answer({"q": q, "k": k[:0], "v": v[:0], "sinks": torch.tensor([5.0])}, {})
    same(sink["lse"], [5.0, 5.0])
    same(sink["o"], [[0.0], [0.0]])
    sink = answer({"q": q, "k": k, "v": v, "sinks": torch.zeros(1)}, {"scale": 0.0})
    same(sink["o"], [[3 / 4]] * 2)


def test_an_unknown_name_is_an_error():
    t = {"q": torch.ones(1, 1), "k": torch.ones(1, 1), "v": torch.ones(1, 1)}
    with pytest.raises(AssertionError, match="does not know"):
        answer(t | {"bias": torch.ones(1)}, {})
    with pytest.raises(AssertionError, match="does not know"):
        answer(t, {"casual": True})


@pytest.mark.parametrize("masked", ["no", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_agrees_with_torchs_own_attention(masked, causal):
    t = {"q": randn(2, 4, 5, 3), "k": randn(2, 2, 7, 3), "v": randn(2, 2, 7, 6), "do": randn(2, 4, 5, 6)}
    mask = {"no": None, "bool": randn(4, 5, 7) > -0.7, "float": randn(2, 1, 1, 7)}[masked]
    got = answer(t | {"attn_mask": mask}, {"causal": causal})
    names = ["q", "k", "v"] + ["attn_mask"] * (masked == "float")
    leaves = {name: (t | {"attn_mask": mask})[name].clone().requires_grad_() for name in names}
    bias = leaves.get("attn_mask", mask)
    if causal:
        below = torch.ones(5, 7, dtype=torch.bool).tril(2)
        bias = below if bias is None else bias & below if masked == "bool" else bias.masked_fill(~below, -INF)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        o = torch.nn.functional.scaled_dot_product_attention(
            leaves["q"], leaves["k"], leaves["v"], bias, enable_gqa=True
        )
    same(got["o"], o.detach())
    grads = torch.autograd.grad(o, list(leaves.values()), t["do"])
    for name, grad in zip(names, grads, strict=True):
        same(got["d" + name], grad)


def everything(layout):
    """Return a call in which every option has an effect on every answer."""
    t = {"sinks": randn(4), "alibi_slopes": randn(2, 4).abs()}
    options = {
        "layout": layout, "causal": True, "window": (4, 2), "softcap": 1.5, "scale": 0.7, "dropout_p": 0.3,
        "dropout_seed": (3 << 32) + 5,
    }  # fmt: skip
    if layout == "thd":
        t |= {
            "q": randn(9, 4, 3),
            "k": randn(11, 2, 3),
            "v": randn(11, 2, 5),
            "do": randn(9, 4, 5),
            "dlse": randn(4, 9),
        }
        return t | {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": torch.tensor([0, 4, 11]), "offset": [1, 2]}, options
    t |= {"q": randn(2, 4, 6, 3), "k": randn(2, 2, 7, 3), "v": randn(2, 2, 7, 5), "do": randn(2, 4, 6, 5)}
    if layout == "bshd":
        t |= {name: t[name].transpose(1, 2) for name in ("q", "k", "v", "do")}
    t |= {"dlse": randn(2, 4, 6), "attn_mask": randn(4, 1, 7), "q_lengths": [6, 5], "kv_lengths": [7, 6]}
    return t, options


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_its_gradients_are_the_differences_of_its_forward(layout):
    t, options = everything(layout)
    got = answer(t, options)
    q_lengths = torch.tensor(t.get("q_lengths", [6, 6]))
    alive = torch.arange(6) < q_lengths[:, None] if layout != "thd" else torch.ones(1, dtype=torch.bool)

    def loss(t):
        forward = answer(t, options)
        lse = forward["lse"].masked_fill(~(alive[:, None] if layout != "thd" else alive), 0.0)
        return ((forward["o"] * t["do"]).sum() + (lse * t["dlse"]).sum()).item()

    for name in ("q", "k", "v", "sinks", *(["attn_mask"] if "attn_mask" in t else [])):
        direction, step = randn(*t[name].shape, seed=3), 1e-5
        difference = loss(t | {name: t[name] + step * direction}) - loss(t | {name: t[name] - step * direction})
        assert difference / (2 * step) == pytest.approx((got["d" + name] * direction).sum().item(), rel=1e-7)


def test_lengths_layouts_and_ranks_are_the_same_numbers_in_other_places():
    t, options = everything("bhsd")
    del t["alibi_slopes"], options["window"]
    whole = answer(t, options)
    other = answer(t | {name: t[name].transpose(1, 2) for name in ("q", "k", "v", "do")}, options | {"layout": "bshd"})
    for name, expected in whole.items():
        same(other[name].transpose(1, 2) if name in ("o", "dq", "dk", "dv") else other[name], expected)
    for b, (n, m) in enumerate(((6, 7), (5, 6))):
        cut = {"q": t["q"][b, :, :n], "k": t["k"][b, :, :m], "v": t["v"][b, :, :m], "do": t["do"][b, :, :n]}
        one = {name: a.transpose(0, 1) for name, a in cut.items()} | {"sinks": t["sinks"], "dlse": t["dlse"][b, :, :n]}
        plain = options | {"layout": "thd", "dropout_p": 0.0}
        packed = answer(one | {"cu_seqlens_q": [0, n], "cu_seqlens_k": [0, m]}, plain)
        padded = answer({name: a for name, a in t.items() if name != "attn_mask"}, options | {"dropout_p": 0.0})
        for name in ("o", "dq"):
            same(packed[name].transpose(0, 1), padded[name][b, :, :n])
        for name in ("dk", "dv"):
            same(packed[name].transpose(0, 1), padded[name][b, :, :m])
        same(packed["lse"], padded["lse"][b, :, :n])
        same(packed["key_weights"], padded["key_weights"][b, :, :m])
    head = {name: t[name][:, 0] for name in ("q", "k", "v", "do")} | {"dlse": t["dlse"][:, 0]}
    three, four = answer(head, {}), answer({name: a[:, None] for name, a in head.items()}, {})
    two = answer({name: a[0] for name, a in head.items()}, {})
    for name, expected in four.items():
        same(three[name], expected[:, 0])
        same(two[name], expected[0, 0])


def test_pages_scales_and_block_masks():
    q, k, v = randn(2, 4, 3, 4), torch.randint(-9, 9, (2, 2, 6, 4)).double(), randn(2, 2, 6, 4)
    expected = answer({"q": q, "k": k * 0.5, "v": v, "kv_lengths": [6, 3]}, {})
    table = torch.tensor([[4, 0, 2], [1, 3, 99]])
    pages = {name: torch.full((5, 2, 2, 4), math.nan, dtype=torch.float64) for name in "kv"}
    for name, t in (("k", k), ("v", v)):
        for b, row in enumerate(table[:, :3].tolist()):
            for n, page in enumerate(row[: 3 if b == 0 else 2]):
                pages[name][page] = t[b, :, 2 * n : 2 * n + 2]
    paged = {"q": q, "block_table": table, "kv_lengths": [6, 3]}
    for scale in (0.5, torch.full((1, 2), 0.5), torch.full((2, 2), 0.5), torch.full((5, 2, 2), 0.5)):
        got = answer(paged | pages | {"k_scale": scale}, {})
        for name in expected:
            same(got[name], expected[name])
    got = answer(
        paged | {name: t.transpose(1, 2) for name, t in pages.items()} | {"q": q.transpose(1, 2), "k_scale": 0.5},
        {"layout": "bshd"},
    )
    same(got["o"].transpose(1, 2), expected["o"])
    q, k, v = randn(1, 2, 40, 4), randn(1, 1, 20, 4), randn(1, 1, 20, 4)
    blocks = torch.tensor([[True, False], [True, True], [False, False]])[None, None]
    spread = blocks.repeat_interleave(16, 2)[:, :, :40].repeat_interleave(16, 3)[..., :20]
    got = answer({"q": q, "k": k, "v": v, "block_mask": blocks}, {"block_size": (16, 16)})
    expected = answer({"q": q, "k": k, "v": v, "attn_mask": spread}, {})
    for name in expected:
        same(got[name], expected[name])
    assert got["lse"][0, 0, 32:].eq(-INF).all()


def test_nan_shows_in_the_rows_that_see_it_alone():
    t = {name: randn(1, 1, 4, 3, seed=n) for n, name in enumerate(("q", "k", "v", "do"))}
    expected = answer(t, {"causal": True})
    spoilt = {name: a.clone() for name, a in t.items()}
    for name in "kv":
        spoilt[name][..., 2, :] = math.nan
    got = answer(spoilt, {"causal": True})
    for name in ("o", "dq"):
        same(got[name][..., :2, :], expected[name][..., :2, :])
        assert got[name][..., 2:, :].isnan().all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_the_kernels_agree_with_it(layout, backend):
    t, options = everything(layout)
    t = {name: a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for name, a in t.items()}
    expected = answer(t, options)
    forward = {name: a for name, a in t.items() if name not in ("do", "dlse")}
    o, lse = attention(**forward, **options, return_lse=True, backend=backend)
    grads = [name for name in expected if name.startswith("d")]
    got = dict(zip(grads, attention_backward(**t, **options, grads=grads, backend=backend), strict=True))
    for name, value in (got | {"o": o, "lse": lse}).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_kernels_agree_with_it_on_8_bit_keys_in_pages(dtype):
    q = randn(2, 4, 3, 16).float()
    pages = {name: (20 * randn(5, 2, 16, 16, seed=n)).to(dtype) for n, name in enumerate("kv")}
    t = {"q": q, **pages, "block_table": torch.tensor([[4, 0, 2], [1, 3, 3]]).int(), "kv_lengths": [40, 17]}
    for scales in ({"k_scale": 0.05, "v_scale": 0.1}, {"k_scale": randn(2, 2).abs(), "v_scale": randn(5, 2, 16).abs()}):
        scales = {name: s.float() / 20 if isinstance(s, torch.Tensor) else s for name, s in scales.items()}
        expected = answer(t | scales, {"causal": True})
        o, lse = attention(**t, **scales, causal=True, return_lse=True)
        torch.testing.assert_close(o.double(), expected["o"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected["lse"], rtol=1e-5, atol=1e-5)
