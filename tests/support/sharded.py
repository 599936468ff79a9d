"""Helpers for tests of a KV cache that several servers share: clients, tokens and expected answers."""

import contextlib

import ml_dtypes
import numpy as np
import torch

import flashpoint
from flashpoint_kernels import attention

HQ, HK, D, DV = 4, 2, 8, 6
SHAPE = {"kv_heads": HK, "head_dim": D, "value_dim": DV}
BOUNDS = {np.dtype(np.float32): 4e-6, np.dtype(np.float16): 2**-9, np.dtype(ml_dtypes.bfloat16): 2**-6}


@contextlib.contextmanager
def clients_of(*servers, **how):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(flashpoint.Client(each.url, timeout=240, **how)) for each in servers]


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expected(q, k, v, **options):
    """Return o and lse of attention over all keys, computed in float64."""
    tensors = (torch.from_numpy(np.asarray(t, np.float64)) for t in (q, k, v))
    given = {name: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for name, t in options.items()}
    o, lse = attention(*tensors, backend="reference", return_lse=True, **given)
    return o.numpy(), lse.numpy()


def near(actual, wanted, bound):
    assert actual.shape == wanted.shape
    actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    assert np.array_equal(actual[~finite], wanted[~finite])
    assert np.abs(actual[finite] - wanted[finite]).max(initial=0) <= bound * max(
        1, np.abs(wanted[finite]).max(initial=0)
    )


def in_layout(t, layout):
    return t.swapaxes(1, 2) if layout == "bshd" else t


def whole(cache, numbers, layer=0):
    """Check that a layer of a cache has exactly the tokens (k, v), by their number and an attention call."""
    k, v = numbers
    q = normal(1, HQ, 1, D, seed=99)
    o, lse = cache.attention(q, layer=layer, return_lse=True)
    wanted = expected(q, k, v)
    near(o, wanted[0], 4e-6)
    near(lse, wanted[1], 4e-6)
    assert cache.lengths[layer] == k.shape[2]


def tokens(count, seed=0):
    return normal(1, HK, count, D, seed=seed), normal(1, HK, count, DV, seed=seed + 1)
