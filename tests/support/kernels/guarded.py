"""Run the kernels in C on arrays next to unreadable pages: `python -m tests.support.kernels.guarded LEVEL`.

A read or write outside an array ends the process by a signal. The program prints the number of calls.
"""

import ctypes
import faulthandler
import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, native, quantize, run
from tests.support.kernels.serving import in_pages
from tests.support.kernels.solving import normal

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
HELD: list[mmap.mmap] = []  # keeps the memory of the current call


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """Return a contiguous copy between two unreadable pages, next to the second (`at_end`) or to the first."""
    pages = -(-max(t.nbytes, 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    HELD.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if LIBC.mprotect(address + page * PAGE, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not t.numel():
        return t
    place = (pages + 1) * PAGE - t.nbytes if at_end else PAGE
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=place).view(t.shape)
    return copy.copy_(t)


def solve(tensors: dict[str, Tensor], options: Options, direction: Any, at_end: bool) -> dict[str, Tensor]:
    problem = Problem.create({name: guarded(t, at_end) for name, t in tensors.items()}, options, direction)
    outputs = {name: guarded(t, at_end) for name, t in problem.outputs.items()}
    run([replace(problem, outputs=outputs)], "cpu")
    return outputs


def problems() -> Iterator[tuple[dict[str, Tensor], dict[str, Any], bool]]:
    """Yield the tensors and options of problems, and whether each problem has a gradient."""
    sizes = ((1, 300, 64, 64), (5, 37, 40, 24), (17, 130, 128, 5), (129, 257, 33, 80))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for (q_len, kv_len, dim, value_dim), dtype in product(sizes, dtypes):
        t = {
            "q": normal(1, 4, q_len, dim).to(dtype), "k": normal(1, 2, kv_len, dim).to(dtype),
            "v": normal(1, 2, kv_len, value_dim).to(dtype),
        }  # fmt: skip
        yield t, {"causal": True}, True
        yield t | {"alibi_slopes": normal(4).abs(), "sinks": normal(4)}, {"window": (20, 9), "softcap": 3.0}, True
        yield t | {"attn_mask": normal(1, 4, q_len, kv_len)}, {"dropout_p": 0.3, "dropout_seed": 1}, True
        yield t | {"attn_mask": normal(q_len, kv_len) > -1}, {}, True
        yield t | {"attn_mask": normal(kv_len).to(dtype)}, {"causal": True}, True
        blocks = normal(1, 4, -(-q_len // 16), -(-kv_len // 48)) > -0.5
        yield t | {"block_mask": blocks}, {"block_size": (16, 48)}, True
        yield in_pages(t | {"kv_lengths": torch.tensor([kv_len])}, "bhsd", 16), {"causal": True}, False
        for kind in (torch.int8, torch.float8_e4m3fn):
            tensors = dict(t)
            for name in "kv":
                tensors[name], tensors[f"{name}_scale"] = quantize(t[name], kind)
            yield tensors, {}, False


def main() -> None:
    faulthandler.enable()
    library = native.level(sys.argv[1])
    native.library = lambda: library
    calls = 0
    for (tensors, options, has_gradient), at_end in product(problems(), (True, False)):
        requested = Options(**options, return_lse=True, backend="cpu")
        actual = solve(tensors, requested, "forward", at_end)
        if has_gradient:
            solve(tensors | actual | {"do": torch.ones_like(actual["o"])}, requested, "backward", at_end)
        calls += 1 + has_gradient
        HELD.clear()
    print(calls)


if __name__ == "__main__":
    main()
