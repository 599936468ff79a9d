"""Ring attention (Liu et al. 2023): each process has a part of the sequence and passes keys to the next process.

    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ring_attention.py

Every process computes the attention of its queries over all keys, one part after another, and then the gradients. The
gradients of the keys are passed on with the keys. The program prints the largest difference from attention in one
process.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, merge


# The code to copy into a program of your own begins here.
def pass_on(*tensors: Tensor) -> list[Tensor]:
    """Send tensors to the next process of the ring; return the tensors of the previous process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
    sent = [dist.P2POp(dist.isend, t.contiguous(), (rank + 1) % world) for t in tensors]
    for request in dist.batch_isend_irecv([*sent, *(dist.P2POp(dist.irecv, t, (rank - 1) % world) for t in received)]):
        request.wait()
    return received


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
        parts, local, rank = [], (k, v), dist.get_rank()
        for part in (*range(rank, -1, -1), *range(dist.get_world_size() - 1, rank, -1)):  # k and v are this part
            if part <= rank:  # causal: queries do not see later parts
                offset = (rank - part) * k.shape[2]  # position of query 0 among the keys of this part
                parts.append(attention(q, k, v, causal=True, offset=offset, return_lse=True))
            k, v = pass_on(k, v)
        o, lse = merge(*zip(*parts, strict=True))
        ctx.save_for_backward(q, *local, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):  # type: ignore[no-untyped-def]
        (q, k, v, o, lse), rank = ctx.saved_tensors, dist.get_rank()
        sums = [torch.zeros_like(t) for t in (q, k, v)]
        for part in (*range(rank, -1, -1), *range(dist.get_world_size() - 1, rank, -1)):
            if part <= rank:  # o and lse cover all keys, so the gradients of the parts add up to the whole
                offset = (rank - part) * k.shape[2]
                grads = attention_backward(do, q, k, v, o, lse, causal=True, offset=offset)
                sums = [t + more for t, more in zip(sums, grads, strict=True)]
            k, v, *sums[1:] = pass_on(k, v, *sums[1:])
        return tuple(sums)


# The code to copy ends here.


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every process draws the same tensors, and uses its part
    whole = [torch.randn(1, heads, 256 * world, 64, requires_grad=True) for heads in (8, 2, 2)]
    do = torch.randn(1, 8, 256 * world, 64)
    expected = attention(*whole, causal=True)
    expected.backward(do)
    local = [t.detach().chunk(world, 2)[rank].requires_grad_() for t in whole]
    o = RingAttention.apply(*local)
    o.backward(do.chunk(world, 2)[rank])
    pairs = [(o, expected), *((part.grad, t.grad) for part, t in zip(local, whole, strict=True))]
    errors = [(answer - truth.chunk(world, 2)[rank]).abs().max().item() for answer, truth in pairs]
    print(f"process {rank} of {world}: o, dq, dk, dv differ by at most {max(errors):.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
