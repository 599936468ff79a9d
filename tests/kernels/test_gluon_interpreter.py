"""The tests' interpreter of Gluon runs a correct program, and reports missing waits between copies and products."""

import math

import pytest
import torch
import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED
from tests.support.kernels import gluon_interpreter as gl
from tests.support.kernels.gluon_interpreter import hopper

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the device does not use the interpreter")
mbarrier, tma = hopper.mbarrier, hopper.tma
TILES, N = 3, 16


@gl.jit
def made(source):
    return tma.make_tensor_descriptor(source, [3 * 16, 16], [16, 1], [16, 16], None)


@gl.jit
def bring(source, x, rows, full, free, MISTAKE: tl.constexpr):
    """Copy the tiles of `source` one after another into `x`, a tile of shared memory."""
    for n in range(3):
        if MISTAKE == "changes the descriptor":
            rows = tma.make_tensor_descriptor(source, [3 * 16, 16], [16, 1], [16, 16], None)
        if MISTAKE == "none with two descriptors":
            if n % 2 == 0:  # noqa: SIM108 -- two lines are two places
                rows = made(source)
            else:
                rows = made(source)
        if n > 0 and MISTAKE != "overwrites" and MISTAKE != "changes the descriptor":
            mbarrier.wait(free.index(0), (n - 1) & 1)
        mbarrier.expect(full.index(0), 16 * 16 * 4 + (4 if MISTAKE == "expects more" else 0))
        tma.async_load(rows, [n * 16, 0], full.index(0), x)


@gl.jit
def add_up(out, x, full, free, MISTAKE: tl.constexpr):
    """Sum the products of each tile with itself."""
    acc = tl.zeros([16, 16], tl.float32)
    for n in range(3):
        if MISTAKE != "reads early":
            mbarrier.wait(full.index(0), n & 1)
        product = hopper.warpgroup_mma(x, x, acc, is_async=True)
        if MISTAKE == "frees early":
            mbarrier.arrive(free.index(0), count=1)
        acc = hopper.warpgroup_mma_wait(1 if MISTAKE == "does not wait" else 0, [product])
        if MISTAKE == "arrives twice":
            mbarrier.arrive(free.index(0), count=1)
        if MISTAKE != "frees early":
            mbarrier.arrive(free.index(0), count=1)
    at = tl.arange(0, 16)
    tl.store(out + at[:, None] * 16 + at[None, :], acc)


@gl.jit
def sums(source, out, MISTAKE: tl.constexpr):
    rows = tma.make_tensor_descriptor(source, [3 * 16, 16], [16, 1], [16, 16], None)
    x = gl.allocate_shared_memory(tl.float32, [16, 16], None)
    full = gl.allocate_shared_memory(tl.int64, [1, 1], None)
    free = gl.allocate_shared_memory(tl.int64, [1, 1], None)
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(free.index(0), count=1)
    gl.warp_specialize(
        [(add_up, (out, x, full, free, MISTAKE)), (bring, (source, x, rows, full, free, MISTAKE))], [1], [24]
    )


def run(mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the computed and the expected result."""
    x = torch.randn(TILES, N, N, generator=torch.Generator().manual_seed(0))
    out = torch.full((N, N), math.inf)
    sums[(1,)](x, out, MISTAKE=mistake)
    return out, (x.double() @ x.double()).sum(0)


@pytest.mark.parametrize("program", ["", "none with two descriptors"])
def test_what_has_no_mistake_is_computed(program: str) -> None:
    """Also where a descriptor is made while a copy by one of another place is under way."""
    computed, expected = run(program)
    torch.testing.assert_close(computed.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mistake", ["reads early", "frees early"])
def test_a_product_of_a_tile_to_which_a_copy_is_under_way_is_an_error(mistake: str) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="reads a tile while a copy to it is under way"):
        run(mistake)


def test_a_product_that_is_used_before_it_is_waited_for_is_an_error() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="a product is used that was not waited for"):
        run("does not wait")


def test_a_descriptor_that_is_made_while_a_copy_is_under_way_is_an_error() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="a descriptor is made while a copy by"):
        run("changes the descriptor")


@pytest.mark.parametrize("mistake", ["overwrites", "arrives twice", "expects more"])
def test_roles_that_wait_for_each_other_forever_are_an_error(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gl, "PATIENCE", 0.25)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"(not ended|not come to a stop) in 0\.25 s"):
        run(mistake)
