"""The columns of the table of sequences that a launch reads fill its rows, and no two columns overlap."""

from flashpoint_kernels.triton_backend.kernels import columns as col

# The number of columns that follow a name's first one: the strides of a tensor, or the second number of BLOCK_SIZE.
FOLLOWING = {
    **dict.fromkeys(("Q", "K", "V", "O", "LSE", "DO", "DQ", "DK", "DV", "DLSE", "STATS", "DS"), 2),
    **dict.fromkeys(("MASK", "DMASK", "K_SCALE", "V_SCALE", "BLOCKS"), 3), "BLOCK_SIZE": 1,
}  # fmt: skip


def test_the_columns_fill_a_row_without_overlap() -> None:
    names = [name for name in vars(col) if name.isupper() and name not in ("SCALE", "SOFTCAP", "KEEP_SCALE", "SCALARS")]
    places = sorted(
        vars(col)[name].value + n for name in names if name != "WIDTH" for n in range(1 + FOLLOWING.get(name, 0))
    )
    assert places == list(range(col.WIDTH.value))


def test_the_floats_have_their_own_columns() -> None:
    assert len({col.SCALE.value, col.SOFTCAP.value, col.KEEP_SCALE.value}) == 3
    assert max(col.SCALE.value, col.SOFTCAP.value, col.KEEP_SCALE.value) < col.SCALARS.value
