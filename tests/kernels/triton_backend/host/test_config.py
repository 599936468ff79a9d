"""A chip uses only a table of tiles for the chip's generation, whose tiles fit the chip's shared memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.triton_backend.host.config import Chip, table_of
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB


@given(st.sampled_from([70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121]), st.integers(16, 300))
def test_a_tile_that_does_not_fit_is_never_chosen(arch: int, shared_kib: int) -> None:
    """`table_of` returns a table for the chip's generation that fits the chip's shared memory, or raises an error."""
    chip = Chip(arch, shared_kib)
    if not any(known // 10 == arch // 10 and kib <= shared_kib for known, kib in SHARED_KIB.items()):
        with pytest.raises(ValueError, match=f"sm_{arch} with {shared_kib} KiB"):
            table_of(chip)
        return
    chosen = table_of(chip)
    assert SHARED_KIB[chosen] <= shared_kib
    assert chosen // 10 == arch // 10
    assert chosen == arch or arch not in SHARED_KIB or SHARED_KIB[arch] > shared_kib
