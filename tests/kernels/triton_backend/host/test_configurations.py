"""Every problem has tiles. A block of `attention_delta` has the largest block_m of the kernels that read its output."""

from flashpoint_kernels.triton_backend.host.config import tiles
from flashpoint_kernels.triton_backend.host.configurations import TABLES, Config, Tile


def test_every_problem_has_tiles() -> None:
    for arch, dtype, level in ((a, d, n) for a in TABLES for d in ("float16", "float32") for n in (0, 1, 2)):
        for dim in (1, 16, 64, 65, 128, 129, 256):
            config = tiles(arch, dtype, dim, 1, level)
            assert config == tiles(arch, dtype, 1, dim, level)
            assert config.split_keys % config.forward.block_n == 0
            assert config.delta == config.backward_q, "aot.tile_of says otherwise of attention_delta"


def test_the_blocks_of_stats_are_whole_for_every_kernel_that_reads_them() -> None:
    wide, narrow = Tile(128, 64), Tile(64, 64)
    assert Config(wide, backward_kv=wide, backward_q=narrow).delta.block_m == 128
    assert Config(wide, backward_kv=narrow, backward_q=wide).delta.block_m == 128
