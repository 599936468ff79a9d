"""Every backend with dropout uses the mask of the contract's formula, which this file computes independently."""

import numpy as np
import pytest
import torch

import flashpoint_kernels
from flashpoint_kernels import Options, Problem
from tests.conftest import DEVICE

MASK32 = (1 << 32) - 1


def philox4x32_10(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Return Philox4x32 with 10 rounds (Salmon et al., SC 2011), in Python integers."""
    k0, k1 = key & MASK32, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK32, (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def test_philox_agrees_with_the_published_vectors() -> None:
    """`philox4x32_10` gives the known answers of Random123's kat_vectors for philox4x32 10."""
    assert philox4x32_10(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32_10((1 << 64) - 1, (MASK32,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def expected_keep(seed: int, p: float, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    keep = np.empty((batch, heads, q_len, kv_len), bool)
    for b, h, i, j in np.ndindex(keep.shape):
        keep[b, h, i, j] = philox4x32_10(seed, (j // 4, i, h, b))[j % 4] / 2**32 >= p
    return keep


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize(("seed", "p"), [(0, 0.5), (2**53 - 1, 0.1), (2**64 - 5, 0.9), (3, 1 - 2**-40)])
def test_mask_is_the_contracts_formula(backend: str, seed: int, p: float) -> None:
    batch, heads, q_len, kv_len = 2, 2, 5, 39
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn((batch, heads, s, 16), generator=g).to(DEVICE) for s in (q_len, kv_len))
    v = torch.eye(kv_len).expand(batch, heads, kv_len, kv_len).to(DEVICE)  # as v is the identity, o is P after dropout
    problem = Problem.create({"q": q, "k": k, "v": v}, Options(dropout_p=p, dropout_seed=seed))
    flashpoint_kernels.run([problem], backend)
    expected = expected_keep(seed, p, batch, heads, q_len, kv_len)
    o = problem.outputs["o"].cpu().double()
    assert torch.equal(o != 0, torch.from_numpy(expected))
    probabilities = torch.softmax(q.cpu().double() @ k.cpu().double().transpose(-1, -2) / 4.0, -1)
    torch.testing.assert_close(o, probabilities * torch.from_numpy(expected) / (1 - p), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_ragged_sequences_count_from_their_own_first_row(backend: str) -> None:
    """In layout thd the dropout mask of a sequence counts rows and keys from the sequence's first row, as in bhsd."""
    lengths, heads, seed, p = [3, 9], 2, 77, 0.4
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn((sum(lengths), heads, 16), generator=g).to(DEVICE) for _ in range(2))
    v = torch.zeros((sum(lengths), heads, max(lengths)))
    for start, n in ((0, 3), (3, 9)):
        v[start : start + n, :, :n] = torch.eye(n)[:, None, :]
    cu = torch.tensor([0, *np.cumsum(lengths).tolist()])
    problem = Problem.create(
        {"q": q, "k": k, "v": v.to(DEVICE), "cu_seqlens_q": cu, "cu_seqlens_k": cu},
        Options(layout="thd", dropout_p=p, dropout_seed=seed),
    )
    flashpoint_kernels.run([problem], backend)
    for b, (start, n) in enumerate(((0, 3), (3, 9))):
        keep = problem.outputs["o"][start : start + n, :, :n].transpose(0, 1).cpu() != 0
        expected = expected_keep(seed, p, b + 1, heads, n, n)[b]
        assert torch.equal(keep, torch.from_numpy(expected))
