"""Attention by its definition, for tests to compare with."""

import torch


def tensors(*shape, dtype=torch.float32, n=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]


def dense(q, k, v, *, mask=None, sinks=None, causal=False):
    """Return (o, lse) of attention by its definition, in float64. q (B,Hq,Sq,D), k and v (B,Hk,Sk,D)."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask.double()
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(-1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1)
    return p[..., : v.shape[-2]] @ v, s.logsumexp(-1)


def close(actual, expected, bound=2e-6):
    actual, expected = torch.as_tensor(actual).double(), expected.detach().double()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= bound * expected.abs().max()
