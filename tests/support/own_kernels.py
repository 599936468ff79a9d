"""The source of a user's module with attention functions, some of them wrong, for tests of the option `--kernel`.

`flashpoint verify --kernel` judges such a function, and `flashpoint benchmark --kernel` times it.
"""

KERNELS = """
import torch

def plain(q, k, v, *, is_causal=False, softmax_scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=softmax_scale)

def peeking(q, k, v, causal=False):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones_like(s, dtype=torch.bool).tril(1 + k.shape[2] - q.shape[2])
        s = s.masked_fill(~seen, float("-inf"))
    return s.softmax(-1) @ v

def takes_no_mask(q, k, v):
    return plain(q, k, v)

def returns_q(q, k, v):
    return q

def returns_a_number(q, k, v):
    return 3

def constant(q, k, v):
    raise NotImplementedError("not yet")

def forward_alone(q, k, v, *, is_causal=False):
    with torch.no_grad():
        return plain(q, k, v, is_causal=is_causal)

number = 3
"""
