"""Every tensor and option works over caches, with a saved forward and beside a block mask, or is refused by name."""

import pytest
import torch

import flashpoint
from flashpoint_contract.options import OPTIONS
from flashpoint_contract.saved import TAKEN_BESIDE
from flashpoint_contract.tensors import GRADS, TENSORS
from flashpoint_kernels import ProblemError
from tests.e2e.test_surfaces import BLOCKS, ENTRIES, problem, solve
from tests.support.messages import normal

FORWARD = [entry for entry in ENTRIES if (OPTIONS.get(entry) or TENSORS[entry]).direction != "backward"]
# `attn_mask` is what a block mask is compared with. The problems of the others have tensors of other sizes.
WITHOUT = ("attn_mask", "block_table", "k_scale", "v_scale", "o", "lse")
BACKWARD = [entry for entry in ENTRIES if entry not in FORWARD]


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


def forward_of(entry):
    """Return (tensors, options) of a forward with the entry; those of `deterministic` have it, too."""
    tensors, options, direction = problem(entry)
    assert direction == "forward"
    return tensors, options


@pytest.mark.parametrize("entry", FORWARD)
def test_an_entry_goes_over_caches_or_is_refused_by_name(client, entry):
    tensors, options = forward_of(entry)
    if entry != "cu_seqlens_k":
        tensors.pop("cu_seqlens_k", None)  # caches have their own lengths
    if refused := "caches" in (OPTIONS.get(entry) or TENSORS[entry]).refused:
        tensors = {name: t.float() if name in "kv" else t for name, t in tensors.items()}
    sequences, heads, dim = 2, 2, 16
    caches = client.caches(sequences, layers=1, kv_heads=heads, head_dim=dim, value_dim=dim, dtype="float32")
    rest = {name: t for name, t in tensors.items() if name not in "qkv"}
    if options.get("layout") != "thd" and not refused:  # the caches have all keys before the call, which writes none
        ahead = options.get("layout") == "bshd"
        like_k = tensors["k"].transpose(1, 2) if ahead else tensors["k"]
        rows = (normal(2, 4, like_k.shape[2], dim), like_k, tensors["v"].transpose(1, 2) if ahead else tensors["v"])
        client.attention(*(t.contiguous() for t in rows), caches=caches, layer=0, at=[0, 0])
        call = {"q": tensors["q"]}
        expected_tensors = tensors
    else:  # new tokens are as many as queries
        call = {name: tensors[name] for name in "qkv"}
        if options.get("layout") == "thd":
            cut = tensors["cu_seqlens_q"] if "cu_seqlens_q" in tensors else torch.tensor([0, 4, 12])
            call = {"q": tensors["q"], "k": tensors["k"][: len(tensors["q"])], "v": tensors["v"][: len(tensors["q"])]}
            expected_tensors = {**tensors, **call, "cu_seqlens_q": cut, "cu_seqlens_k": cut}
        call["at"] = [0, 0]
    if refused:
        with pytest.raises(flashpoint.InvalidInputError, match=rf"\b{entry}\b"):
            client.attention(caches=caches, layer=0, **call, **rest, **options)
        return
    found = client.attention(caches=caches, layer=0, **call, **rest, **options)
    expected = solve(expected_tensors, options, "forward")
    actual = dict(zip(expected, found if isinstance(found, tuple) else (found,), strict=True))
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entry", FORWARD)
def test_a_forward_with_the_entry_is_saved_and_has_gradients_or_is_refused_by_name(client, entry):
    tensors, options = forward_of(entry)
    q, k, v = (tensors.pop(name) for name in "qkv")
    if "saved" in (OPTIONS.get(entry) or TENSORS[entry]).refused:
        with pytest.raises((flashpoint.InvalidInputError, TypeError), match=rf"\b{entry}\b"):
            client.attention(q, k, v, save=True, **tensors, **options)
        return
    saved = client.attention(q, k, v, save=True, **tensors, **options)
    do = normal(*saved.o.shape, seed=5)
    actual = client.attention_grad(do, saved=saved)
    of_gradients = {name: value for name, value in options.items() if name != "return_lse"}
    expected = solve({"q": q, "k": k, "v": v, "do": do, **tensors}, of_gradients, "backward")
    for name, t in zip(GRADS[:3], actual, strict=True):
        torch.testing.assert_close(t, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("entry", BACKWARD)
def test_a_gradient_of_a_saved_forward_takes_an_entry_or_refuses_it_by_name(client, entry):
    tensors, options, _ = problem(entry)
    q, k, v, do = (tensors[name] for name in ("q", "k", "v", "do"))
    saved = client.attention(q, k, v, save=True)
    more = {entry: tensors[entry]} if entry in tensors and entry != "do" else {}
    if entry not in TAKEN_BESIDE[0] + TAKEN_BESIDE[1]:
        with pytest.raises((flashpoint.InvalidInputError, TypeError), match=rf"\b{entry}\b"):
            client.attention_grad(do, saved=saved, **more)
        return
    actual = client.attention_grad(do, saved=saved, **more, **options)
    expected = solve({"q": q, "k": k, "v": v, "do": do, **more}, options, "backward")
    for name, t in zip(options.get("grads", GRADS[:3]), actual, strict=True):
        torch.testing.assert_close(t, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry not in WITHOUT])
def test_an_entry_beside_a_block_mask_is_right_or_refused_by_name(entry, backend):
    tensors, options, direction = problem(entry)
    options |= {"backend": backend, "block_size": OPTIONS["block_size"].example}
    if "cu_seqlens_q" in tensors:
        with pytest.raises(ProblemError, match=r"block_mask: is only for layout"):
            solve(tensors | {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, options, direction)
        return
    layout = options.get("layout", "bhsd")
    blocks = normal(1, 4, 2, 2, seed=1) > 0
    sizes = {name: TENSORS[name].shape(BLOCKS, layout, 4) for name in tensors}
    given = {
        name: normal(*sizes[name], seed=n) if t.is_floating_point() else t
        for n, (name, t) in enumerate(tensors.items())
    }
    given.pop("block_mask", None)
    dense = blocks.repeat_interleave(16, 2)[:, :, :20].repeat_interleave(32, 3)[..., :40]
    actual = solve(given | {"block_mask": blocks}, options, direction)
    expected = solve(given | {"attn_mask": dense}, options | {"backend": "tiled"}, direction)
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-5)
