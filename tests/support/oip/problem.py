"""A small attention problem, and its answers in float64."""

import torch

B, H, S, D = 1, 2, 24, 16
GRAD = ("q", "k", "v", "do")
BOUNDS = {
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float32: 2e-6,
    torch.float64: 1e-12,
}  # the maximum error of an answer, relative to its largest absolute value


def problem(dtype=torch.float32, names="qkv", seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(B, H, S, D, generator=generator, dtype=torch.float64).to(dtype) for n in (*"qkv", "do")}
    return {n: tensors[n] for n in names}


def truth(tensors, *, causal=False, mask=None, offset=0):
    """Return o, lse and the gradients, by autograd in float64."""
    q, k, v = (tensors[n].detach().double().requires_grad_() for n in "qkv")
    s = q @ k.transpose(-1, -2) / D**0.5
    if mask is not None:
        s = s + mask.double()
    if causal:
        s = s.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1 + offset), -torch.inf)
    o, lse = s.softmax(-1) @ v, s.logsumexp(-1)
    answers = {"o": o, "lse": lse}
    if "do" in tensors:
        answers |= zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), tensors["do"].double()), strict=True)
    return {name: t.detach() for name, t in answers.items()}


def near(actual, expected, bound):
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= bound * expected.abs().max()
