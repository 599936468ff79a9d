"""Triton's kernels over caches, whose pages they read in place: interpreted here, on a GPU by `make gpu-serve`."""

import torch

import flashpoint
from tests.support.messages import normal


def test_bits_are_those_of_a_call_that_sends_all_keys(gated):
    """After forks, cuts and rewrites, and for two caches of different lengths in one call."""
    shapes = (1, 2, 5, 16), (1, 1, 40, 16), (1, 1, 40, 16)
    q, k, v = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
    with flashpoint.Client(gated.server.url, timeout=240) as client:
        whole = client.attention(q[:, :, 4:], k, v, backend="triton")
        cut = client.attention(q[:, :, 4:], k[:, :, :20], v[:, :, :20], backend="triton")
        with client.cache(kv_heads=1, head_dim=16) as cache:
            cache.append(k[:, :, :35], v[:, :, :35])
            prompt = cache.attention(q, k[:, :, 35:], v[:, :, 35:], causal=True, backend="triton")
            torch.testing.assert_close(prompt[:, :, 4:], whole, rtol=0, atol=1e-6)
            with cache.fork(20) as short:
                cache.append(v[:, :, :3], k[:, :, :3], at=17)
                cache.append(k[:, :, 17:], v[:, :, 17:], at=17)
                both = client.attention(q[:, :, 4:].repeat(2, 1, 1, 1), caches=[cache, short], backend="triton")
        assert torch.equal(both, torch.cat((whole, cut)))
