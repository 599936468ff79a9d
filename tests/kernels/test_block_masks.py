"""A block mask gives the answers of the dense mask that shows the same scores, and skipped blocks are never read."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, ProblemError, attention, create_block_mask, verify
from flashpoint_kernels.problems.problem import launch_key
from flashpoint_kernels.problems.reproducible import split
from tests.conftest import DEVICE
from tests.support.kernels.serving import drawn_blocks
from tests.support.kernels.solving import backward, forward, normal, qkv


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_a_block_that_is_skipped_is_not_read(backend: str) -> None:
    """NaN in keys and values of skipped blocks does not change the answers, and the gradients of these keys are 0."""
    size, (q_len, kv_len) = ((128, 128), (256, 384)) if backend == "tiled" else ((64, 64), (128, 192))
    tensors = qkv(1, 2, q_len, kv_len, 16, kv_heads=1)
    tensors["block_mask"] = torch.tensor([[[[True, False, True], [True, False, False]]]], device=DEVICE)
    for name in ("k", "v"):
        tensors[name][:, :, size[1] : 2 * size[1]] = torch.nan
    actual = forward(backend, tensors, block_size=size)
    actual |= backward(backend, tensors, block_size=size)
    assert all(t.isfinite().all() for t in actual.values())
    for name in ("dk", "dv"):
        assert not actual[name][:, :, size[1] : 2 * size[1]].any()
        assert actual[name][:, :, 2 * size[1] :].any()


@pytest.mark.parametrize("backend", ["tiled", "triton", "reference"])
def test_a_query_without_a_block_attends_to_nothing(backend: str) -> None:
    tensors = qkv(1, 2, 40, 40, 16)
    tensors["block_mask"] = torch.tensor([[[[True, True, True], [False, False, False], [True, True, False]]]]).to(
        DEVICE
    )
    actual = forward(backend, tensors, block_size=(16, 16))
    assert not actual["o"][:, :, 16:32].any()
    assert actual["lse"][:, :, 16:32].isneginf().all()
    assert not backward(backend, tensors, block_size=(16, 16))["dq"][:, :, 16:32].any()


def test_without_blocks_the_variant_is_another() -> None:
    tensors = qkv(1, 1, 16, 16, 8)
    plain = Problem.create({n: t for n, t in tensors.items() if n != "do"}, Options())
    masked = Problem.create(
        {**{n: t for n, t in tensors.items() if n != "do"}, "block_mask": drawn_blocks(1, 1, 1, 1)}, Options()
    )
    assert launch_key(plain.spec, "triton") != launch_key(masked.spec, "triton")


@pytest.mark.parametrize("shared", [False, True])
def test_bits_are_the_same_alone_and_among_others(shared: bool) -> None:
    """A sequence has the same bits in a problem of three sequences and in a problem of its own."""
    tensors = qkv(3, 4, 300, 260, 16, kv_heads=2)
    tensors["block_mask"] = drawn_blocks(1 if shared else 3, 4, 5, 5)
    for of in (forward, backward):
        whole = of("tiled", tensors, block_size=(64, 64))
        for b in range(3):
            sequence = {n: t[b : b + 1] if len(t) > 1 else t for n, t in tensors.items()}
            for name, t in of("tiled", sequence, block_size=(64, 64)).items():
                assert torch.equal(t[0], whole[name][b]), name


def test_a_sparse_problem_is_cut_into_fewer_parts() -> None:
    tensors = {n: t for n, t in qkv(1, 8, 1024, 1024, 16).items() if n != "do"}
    plain = len(split(Problem.create(tensors, Options()), "tiled"))
    tensors["block_mask"] = torch.eye(8, dtype=torch.bool, device=DEVICE)[None, None]
    assert len(split(Problem.create(tensors, Options()), "tiled")) < plain


def test_gradients_flow_through_attention() -> None:
    tensors = qkv(1, 2, 20, 36, 3)  # small, because gradcheck calls the function twice for each element
    leaves = [tensors[name].double().requires_grad_() for name in "qkv"]
    mask, size = drawn_blocks(1, 2, 2, 2), (16, 32)

    def call(*given: torch.Tensor) -> Any:
        return attention(*given, block_mask=mask, block_size=size, backend="reference")

    assert torch.autograd.gradcheck(call, leaves)
    masked = mask.double().requires_grad_()
    with pytest.raises(ProblemError, match="block_mask"):
        attention(*leaves, block_mask=masked)


def test_auto_takes_a_backend_that_skips() -> None:
    tensors = {n: t for n, t in qkv(1, 1, 16, 16, 8).items() if n != "do"} | {"block_mask": drawn_blocks(1, 1, 1, 1)}
    assert verify(tensors, Options()).backend == ("triton" if DEVICE == "cuda" else "cpu")
    assert verify(tensors | {"do": normal(1, 1, 16, 8)}, Options()).backend == ("triton" if DEVICE == "cuda" else "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_mask": torch.ones(1, 1, 2, 3, dtype=torch.bool)}, r"block_mask: shape .* of blocks of 128 x 128"),
        ({"block_mask": torch.ones(1, 1, 1, 1)}, r"block_mask: dtype float32 must be bool"),
        (
            {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": (128, 100)},
            r"block_size: .*multiples",
        ),
        ({"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "block_size": (0, 128)}, r"block_size"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    q, k, v = (normal(1, 2, 200, 8) for _ in range(3))
    with pytest.raises(ProblemError, match=message):
        attention(q, k, v, **change)


def test_packed_sequences_have_no_blocks() -> None:
    q, ends = normal(30, 2, 8), torch.tensor([0, 30])
    with pytest.raises(ProblemError, match="block_mask: is only for layout bhsd and bshd, not thd"):
        attention(
            q, q, q, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends,
            block_mask=torch.ones(1, 2, 1, 1, dtype=torch.bool),
        )  # fmt: skip


# create_block_mask


def test_a_rule_and_its_dense_mask_have_the_same_blocks() -> None:
    document = torch.arange(300) // 70
    shift = torch.tensor([0, 40, 100])
    rules = {
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: document[i] == document[j],
        "of heads": lambda b, h, i, j: i - j <= shift[h],
        "nothing": lambda b, h, i, j: i < 0,
    }
    i, j = torch.arange(300)[:, None], torch.arange(300)
    for rule in rules.values():
        actual = create_block_mask(rule, 2, 3, 300, 300, block_size=(32, 64))
        assert actual.shape == (2, 3, 10, 5)
        whole = rule(torch.arange(2)[:, None, None, None], torch.arange(3)[:, None, None], i, j)
        assert torch.equal(actual, create_block_mask(whole.expand(2, 3, 300, 300), block_size=(32, 64)))
        for a, b in ((0, 0), (3, 1), (9, 4)):
            part = whole.expand(2, 3, 300, 300)[:, :, 32 * a : 32 * a + 32, 64 * b : 64 * b + 64]
            assert torch.equal(actual[:, :, a, b], part.flatten(2).any(2))


def test_a_rule_gives_attention_with_the_mask_that_it_says() -> None:
    t = qkv(1, 2, 200, 200, 8)
    q, k, v = (t[name] for name in "qkv")
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 200, 200, DEVICE, block_size=64)
    assert blocks.shape == (1, 1, 4, 4)
    expected = attention(q, k, v, causal=True, backend="reference")
    actual = attention(q, k, v, causal=True, block_mask=blocks, block_size=(64, 64), backend="reference")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((lambda b, h, i, j: i >= j,), "q_len"),
        ((lambda b, h, i, j: i >= j, 1, 1, 5, -1), "kv_len"),
        ((lambda b, h, i, j: i - j, 1, 1, 5, 5), "mask"),
        ((lambda b, h, i, j: torch.ones(3, 5, dtype=torch.bool), 1, 1, 5, 5), "mask"),
        ((torch.ones(4, 4),), "mask"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(ProblemError, match=name):
        create_block_mask(*arguments)
    with pytest.raises(ProblemError, match="block_size"):
        create_block_mask(torch.ones(4, 4, dtype=torch.bool), block_size=24)


def test_an_empty_mask_has_no_blocks() -> None:
    assert create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 0, 200).shape == (1, 1, 0, 2)
    assert create_block_mask(torch.ones(2, 0, dtype=torch.bool)).shape == (1, 0)
