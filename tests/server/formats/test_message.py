"""A request with invalid tensors or options gets 422, and the error names each wrong field."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.messages import message, normal, post, problem, small

SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}


F64 = {name: t.double() for name, t in SMALL.items()}


INVALID = {
    "k missing": (message({n: SMALL[n] for n in "qv"}), {"k"}),
    "misspelt option": (small(casual=True), {"casual"}),
    "misspelt tensor": (message({**SMALL, "mask": SMALL["q"]}), {"mask"}),
    "option of another type": (small(causal=1), {"causal"}),
    "word that is no JSON": (small(causal="yes"), {"causal"}),
    "window of three": (small(window=[1, 2, 3]), {"window"}),
    "infinite scale": (small(scale="1e999"), {"scale"}),
    "dropout of 1": (small(dropout_p=1), {"dropout_p"}),
    "integer q": (message({n: torch.ones(2, 3, dtype=torch.int32) for n in "qkv"}), {"q"}),
    "dtypes differ": (message({**SMALL, "v": SMALL["v"].half()}), {"v"}),
    "a dtype that is not served": (message({**SMALL, "attn_mask": torch.ones(2, 2, dtype=torch.uint8)}), {"attn_mask"}),
    "head dimensions differ": (message({**SMALL, "k": normal(2, 4)}), {"k"}),
    "ranks differ": (message({**SMALL, "k": normal(1, 2, 3)}), {"k"}),
    "mask does not broadcast": (message({**SMALL, "attn_mask": normal(3, 2)}), {"attn_mask"}),
    "no such backend": (small(backend="magic"), {"backend"}),
    "triton without a GPU": (small(backend="triton"), {"backend"}),
    "what torch cannot do": (message(F64, backend="cpu"), {"q"}),
    "float64 on tiled": (message(F64, backend="tiled"), {"q"}),
    "head dimension of 600": (message({n: normal(2, 600) for n in "qkv"}, backend="tiled"), {"q"}),
    "lengths beyond the tensor": (message({**SMALL, "kv_lengths": torch.tensor([3])}), {"kv_lengths"}),
    "negative lengths": (message({**SMALL, "q_lengths": torch.tensor([-1])}), {"q_lengths"}),
    "several at once": (small(causal=1, layout="sbhd"), {"causal", "layout"}),
    "cu_seqlens that fall": (
        message(
            {n: normal(4, 1, 8) for n in "qkv"}
            | {"cu_seqlens_q": torch.tensor([0, 3, 2, 4]), "cu_seqlens_k": torch.tensor([0, 1, 2, 4])},
            layout="thd",
        ),
        {"cu_seqlens_q"},
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_not_valid_is_422_and_names_each_field(server, name):
    body, fields = INVALID[name]
    document = problem(post(server, "/attention", body), 422, "invalid_request")
    assert {error["loc"][0] for error in document["errors"]} == fields
    assert all(error["msg"] for error in document["errors"])


def test_invalid_gradient_requests_are_422(server):
    grad = {**SMALL, "do": SMALL["q"]}
    for body, field in [
        (small(), "do"),
        (message(grad, dropout_p=0.5), "dropout_seed"),
        (message({**grad, "o": SMALL["q"]}), "lse"),
        (message(grad, grads=["dsinks"]), "grads"),
        (message({**grad, "attn_mask": torch.ones(2, 2, dtype=torch.bool)}, grads=["dattn_mask"]), "grads"),
    ]:
        document = problem(post(server, "/attention/grad", body), 422, "invalid_request")
        assert [error["loc"] for error in document["errors"]] == [[field]]
