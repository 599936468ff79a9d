"""The AMX kernels are right on processors with AVX-512 but no AMX, where C code emulates the tile instructions."""

from pathlib import Path

import pytest
import torch

from flashpoint_kernels import Options, attention, attention_backward, native, verify
from tests.kernels.conftest import LEVELS
from tests.support.kernels import tiles_in_c
from tests.support.kernels.shared_pages import check
from tests.support.kernels.solving import normal, qkv

pytestmark = pytest.mark.skipif("avx512" not in LEVELS, reason="tiles are vectors of AVX-512")


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> native.Library:
    return tiles_in_c.loaded(tiles_in_c.library(tmp_path_factory.mktemp("tiles")))


# Queries 96 to 127 of the second block of 128 see nothing of some block of keys. In the first window the keys that they
# see begin after it, in the second they end before it.
@pytest.mark.parametrize("window", [(20, 0), (0, 20)], ids=str)
def test_a_window_that_leaves_some_queries_without_keys_of_a_block(
    in_c: native.Library, monkeypatch: pytest.MonkeyPatch, window: tuple[int, int]
) -> None:
    monkeypatch.setattr(native, "library", lambda: in_c)
    t = qkv(1, 1, 256, 384, 32, dtype=torch.bfloat16)
    report = verify(t, Options(backend="cpu", window=window))
    assert report.ok, [e for e in report.tensors if not e.ok]


def test_wide_values_that_are_infinite_reach_no_row_that_does_not_see_them(
    in_c: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of 576 columns are copied without their infinities; the copy of a row once had room for 256."""
    monkeypatch.setattr(native, "library", lambda: in_c)
    t = {name: x for name, x in qkv(1, 1, 40, 40, 576, dtype=torch.bfloat16).items() if name != "do"}
    t["v"][:, :, 39] = torch.inf
    finite = {**t, "v": t["v"].nan_to_num(posinf=1.0)}
    actual, expected = (attention(**x, causal=True, backend="cpu") for x in (t, finite))
    assert torch.equal(actual[:, :, :39], expected[:, :, :39])
    assert actual[:, :, 39].isinf().all()


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"softcap": 4.0}, {"dropout_p": 0.3, "dropout_seed": 1}], ids=str
)
def test_they_agree_with_float64(
    in_c: native.Library, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr(native, "library", lambda: in_c)
    for q_len, kv_len, dim in ((1, 300, 64), (40, 270, 40), (66, 70, 128)):
        t = qkv(1, 4, q_len, kv_len, dim, kv_heads=2, dtype=torch.bfloat16)
        report = verify(t, Options(backend="cpu", **options))  # type: ignore[arg-type]
        assert report.ok, [e for e in report.tensors if not e.ok]


def test_they_read_shared_pages_together(in_c: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: in_c)
    check([0, 2048, 2100, 1024], [2500, 3, 1, 40], 64, 5, 3, torch.bfloat16, None)


@pytest.mark.skipif("amx" not in LEVELS, reason="the processor has no AMX to compare with")
def test_they_have_the_bits_of_the_processors_tiles(in_c: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    have_equal_bits(in_c, "amx", monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif("avx512bf16" not in LEVELS, reason="the processor has no AVX512-BF16 to compare with")
def test_pairs_in_c_have_the_bits_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = tiles_in_c.loaded(tiles_in_c.library(tmp_path, products="PAIRS_IN_C"))
    have_equal_bits(in_c, "avx512bf16", monkeypatch)


def have_equal_bits(in_c: native.Library, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t = {name: x for name, x in qkv(2, 4, 130, 300, 72, kv_heads=2, dtype=torch.bfloat16).items() if name != "do"}
    results = []
    for library in (in_c, native.level(level)):
        monkeypatch.setattr(native, "library", lambda library=library: library)
        o, lse = attention(**t, causal=True, return_lse=True, softcap=5.0)
        do = normal(*o.shape, seed=8).to(torch.bfloat16)
        results.append((o, lse, *attention_backward(do, **t, o=o, lse=lse, causal=True, softcap=5.0)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
