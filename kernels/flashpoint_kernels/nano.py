"""The smallest complete forward kernel, in one piece: start here. docs/algorithm.md explains it step by step.

It supports: o and the log-sum-exp; float16, bfloat16 and float32; any lengths, any head dimension up to 256;
bottom-right causal masks; o = 0 and lse = −inf for a query that sees no key. One program computes BLOCK queries of one
head, and loops over the keys in tiles of BLOCK (FlashAttention-2, Dao 2023, Algorithm 1). The real kernels add: a table
of sequences instead of one shape, all options, tiles for each architecture, and the backward.

Notation: i queries, j keys, d columns; s scores (BLOCK, BLOCK) and p their exponentials; for each row, m is the running
maximum, l the running denominator and acc the running numerator.

`python -m flashpoint_kernels.nano` prints the kernel and runs it: on the GPU, or without one in Triton's interpreter.
"""

import inspect
import io
import math
import os
import re
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_kernels.problems.memory import in_memory
from flashpoint_kernels.triton_backend.host.config import chip_of, padded
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED, cast, dot
from flashpoint_kernels.verification import Verification, verify

_SHOWN = (  # (queries, keys, head dimension, causal, dtype)
    (512, 512, 32, False, torch.float32), (512, 512, 32, True, torch.float32), (113, 203, 59, True, torch.float16),
    (128, 128, 128, False, torch.bfloat16),
)  # fmt: skip


@triton.jit
def nano_forward(
    q, k, v, o, lse, q_len, kv_len, dim, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    i, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    head = tl.program_id(0).to(tl.int64)  # offsets may be beyond 2³¹
    own, rows = (head * q_len + i)[:, None] * dim + d, (i[:, None] < q_len) & (d < dim)
    b_q = tl.load(q + own, rows, 0.0)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l, acc = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, D], tl.float32)  # noqa: E741
    offset = kv_len - q_len
    end = tl.minimum(kv_len, (tl.program_id(1) + 1) * BLOCK + offset) if CAUSAL else kv_len
    for j0 in range(0, end, BLOCK):  # dot(a, b, c, tf32) is a·b + c in float32, here without tf32
        j = j0 + tl.arange(0, BLOCK)
        at, keys = (head * kv_len + j)[:, None] * dim + d, (j[:, None] < kv_len) & (d < dim)
        s = dot(b_q, tl.trans(tl.load(k + at, keys, 0.0)), tl.zeros([BLOCK, BLOCK], tl.float32), False) * scale
        seen = (j < kv_len) & ((j <= i[:, None] + offset) | (not CAUSAL))
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet: −inf − −inf is NaN
        p, shrink = tl.exp(s - shift[:, None]), tl.exp(m - shift)
        m, l = m_new, l * shrink + tl.sum(p, 1)  # noqa: E741
        acc = dot(cast(p, v.dtype.element_ty), tl.load(v + at, keys, 0.0), acc * shrink[:, None], False)
    l = tl.where(l == 0.0, 1.0, l)  # noqa: E741  # nothing seen: m is −inf, so o = 0 and lse = −inf
    tl.store(o + own, cast(acc / l[:, None], o.dtype.element_ty), rows)  # cast: rounded to a dtype
    tl.store(lse + head * q_len + i, m + tl.log(l), i < q_len)


def tile_rows(shared_kib: int, head_dim: int, itemsize: int) -> int:
    """Return the number of queries and keys of a tile, 16 to 128.

    It is the largest power of two for which eight tiles BLOCK × D fit. Five are in shared memory at once: q, and the
    current and the next tile of k and of v, because the next ones are loaded while the current ones are multiplied.
    Three more are room for p, which is BLOCK × BLOCK, and for the compiler's copies, so the rule divides by 8.

    Args:
        shared_kib: Shared memory of one program in KiB.
        head_dim: D.
        itemsize: Bytes of one number.
    """
    fitting = shared_kib * 1024 // (8 * padded(head_dim) * itemsize)
    return min(128, 1 << max(16, fitting).bit_length() - 1)


def nano_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return (o, lse) of softmax(q·kᵀ/√D)·v, by the one kernel above (FlashAttention-2, Dao 2023, Algorithm 1).

    Forward only, with as many key/value heads as query heads.

    Args:
        q: Queries, (…, Sq, D), D at most 256. float16, bfloat16 or float32, on a CUDA device (any device under
            TRITON_INTERPRET=1).
        k: Keys, (…, Sk, D), of q's dtype and device.
        v: Values, (…, Sk, D), of q's dtype and device.
        causal: Query i sees key j only if j <= i + Sk − Sq.

    Returns:
        o, of q's shape and dtype, and lse, float32 (…, Sq).

    Raises:
        ValueError: the tensors do not fit.
    """
    if k.shape != v.shape or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]) or q.shape[-1] > 256:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be (…, Sq, D), (…, Sk, D) and (…, Sk, D)"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, but must all be float16, bfloat16 or float32"
        )
    if torch._C._is_tracing():
        raise RuntimeError("torch.jit.trace cannot record nano_attention: trace `attention`, which is an operator")
    q, k, v = map(in_memory, "qkv", (q, k, v))
    (*heads, q_len, dim), kv_len = q.shape, k.shape[-2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    # 48 KiB: each program on any GPU has at least this much shared memory
    rows = tile_rows(48 if INTERPRETED else chip_of(q.device).shared_kib, dim, q.itemsize)
    nano_forward[math.prod(heads), triton.cdiv(q_len, rows)](
        q.contiguous(), k.contiguous(), v.contiguous(), o, lse, q_len, kv_len, dim, dim**-0.5, causal, rows,
        padded(dim), num_warps=8, num_stages=2,
    )  # fmt: skip
    return o, lse


def source() -> str:
    """Return the source of the kernel without the marks for linters, as the documentation shows it."""
    return re.sub(
        r"  # (noqa: \w+|fmt: \w+)(?=$|  #)", "", inspect.getsource(nano_forward.fn).rstrip(), flags=re.MULTILINE
    )


def tried(device: str) -> list[tuple[str, Verification]]:
    """Run the kernel on some problems on `device`. Return for each a description, and its errors against float64."""
    lines = []
    for q_len, kv_len, dim, causal, dtype in _SHOWN:
        generator = torch.Generator("cpu").manual_seed(0)
        q, k, v = (
            torch.randn(1, 2, n, dim, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
            for n in (q_len, kv_len, kv_len)
        )
        o, lse = nano_attention(q, k, v, causal)
        judged = verify({"q": q, "k": k, "v": v}, Options(causal=causal), answers={"o": o, "lse": lse})
        words = f"Sq {q_len}, Sk {kv_len}, D {dim}{', causal' if causal else ''}, {judged.dtype}"
        lines.append((words, judged))
    return lines


def main() -> int:
    """Print the kernel, its tiles and its errors. Return 1 if an error exceeds its bound."""
    if not torch.cuda.is_available() and not INTERPRETED:  # Triton reads the variable at its import
        command = [sys.executable, "-P", "-m", "flashpoint_kernels.nano"]
        os.execve(sys.executable, command, os.environ | {"TRITON_INTERPRET": "1"})
    shown = source()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the source has letters that not every terminal can show
    print(f"{shown}\n\n{len(shown.splitlines())} lines.\n")
    device, where = ("cpu", "Triton's interpreter") if INTERPRETED else ("cuda", torch.cuda.get_device_name())
    known = {} if INTERPRETED else {where: chip_of(torch.device(device)).shared_kib}
    known |= {f"sm_{arch}": kib for arch, kib in SHARED_KIB.items()}
    print("Rows of a tile, by the shared memory of a program (float16 D 64, float32 D 64, float16 D 128):")
    for name, kib in known.items():
        print(f"  {name:<22} {kib:>4} KiB ", *(f"{tile_rows(kib, *of):>4}" for of in ((64, 2), (64, 4), (128, 2))))
    print(f"\nLargest errors against float64, in {where}:")
    print(f"  {'':<40} {'':<4} {'error':>8} {'torch':>8} {'bound':>8}")
    problems = tried(device)
    for words, judged in problems:
        for t in judged.tensors:
            over = "" if t.ok else "  OVER"
            print(f"  {words:<40} {t.name:<4} {t.max_abs:8.1e} {t.torch.max_abs:8.1e} {t.bound:8.1e}{over}")
    return 0 if all(judged.ok for _, judged in problems) else 1


if __name__ == "__main__":
    sys.exit(main())
