"""The checks of PTX count missing proxy fences, and loads that run ahead of a matrix product."""

import pytest

from flashpoint_kernels.triton_backend.tools.ptx import Ptx

# A loop with two pipeline stages, as Triton 3.6.0 compiles it for sm_90; it omits the fence at {fence}.
LOOP = """
cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
cp.async.commit_group;
fence.proxy.async.shared::cta;
@%p1 bra $L__BB0_3;
$L__BB0_2:
cp.async.wait_group {left};
bar.sync 0;
{fence}
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r3}}, %rd2, %rd3, 1;
wgmma.wait_group.sync.aligned 0;
cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
cp.async.commit_group;
@%p2 bra $L__BB0_2;
$L__BB0_3:
ret;
"""


FENCE = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize(("fence", "missing"), [("", 1), (FENCE, 0)])
def test_a_copy_that_a_product_reads_needs_a_fence_after_its_wait(fence: str, missing: int) -> None:
    assert Ptx(LOOP.format(fence=fence, left=0)).missing_fences() == missing


def test_a_fence_is_looked_for_on_every_path() -> None:
    """Every path is checked for a fence, also if the wait comes after the loop body in the text, as for sm_100."""
    text = """
bra.uni $L__BB0_2;
$L__BB0_1:
@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;
{before}
@%p4 bra $L__BB0_2;
ret;
$L__BB0_2:
cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
cp.async.commit_group;
{before}
cp.async.wait_group 0;
{after}
bra.uni $L__BB0_1;
"""
    assert Ptx(text.format(before=FENCE, after="")).missing_fences() == 1
    assert Ptx(text.format(before="", after=FENCE)).missing_fences() == 0


def test_a_fence_between_two_waits_orders_the_first_copy_alone() -> None:
    """A fence between two waits orders only the first copy, K. The copy of V, which arrives later, needs its own.

    Triton 3.7.1 omits the fence for V.
    """
    copies = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\ncp.async.commit_group;\n" * 2
    product = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r3}, %rd2, %rd3, 1;\n"
    text = copies + f"cp.async.wait_group 1;\n{FENCE}\n{product}cp.async.wait_group 0;\n{product}ret;\n"
    assert Ptx(text).missing_fences() == 1
    assert Ptx(text.replace("wait_group 1", "wait_group 0")).missing_fences() == 0


def test_copies_of_a_mask_need_no_fence() -> None:
    """Copies of a mask (`cp.async.ca`) need no fence, because no matrix instruction reads a mask."""
    assert Ptx(LOOP.format(fence="", left=0).replace("cp.async.cg", "cp.async.ca")).missing_fences() == 0


@pytest.mark.parametrize(("left", "ahead"), [(0, 0), (1, 1), (2, 1)])
def test_loads_ahead_are_the_copies_under_way_at_a_product(left: int, ahead: int) -> None:
    """Loads ahead are copies that still run during a product; there are none if the loop waits for all copies first."""
    text = LOOP.format(fence=FENCE, left=left)
    if left == 2:  # a second product runs during two loads; the result is the minimum over products
        text = LOOP.format(fence=FENCE, left=1).replace(
            "@%p2 bra", "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r3}, %rd2, %rd3, 1;\n@%p2 bra"
        )
    assert Ptx(text).loads_ahead() == ahead
    assert Ptx("ret;").loads_ahead() == 0
