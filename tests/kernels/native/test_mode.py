"""The kernels in C compute in the default mode of the processor's arithmetic, whatever the mode of the program is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashpoint_kernels import attention, attention_backward, native
from tests.support.kernels.solving import qkv

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="without the kernels in C"),
    pytest.mark.skipif(not torch.set_flush_denormal(True), reason="the processor cannot flush denormal numbers"),
]
torch.set_flush_denormal(False)


@pytest.fixture
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def given() -> dict[str, torch.Tensor]:
    t = qkv(4, 2, 256, 256, 32)
    return t | {"v": t["v"] * 1e-40, "do": t["do"] * 1e-40}


def answers(t: dict[str, torch.Tensor], threads: int, **options: object) -> list[torch.Tensor]:
    """Return o and gradients of denormal values, from as many shares as threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        o, lse = attention(**{n: t[n] for n in "qkv"}, return_lse=True, **options)  # type: ignore[arg-type]
        return [o, *attention_backward(**t, o=o, lse=lse, **options)]  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_denormal_numbers_stay_in_all_threads(
    given: dict[str, torch.Tensor], threads: int, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    expected = answers(given, 1, **options)
    assert all(expected[n].any() for n in (0, 3))
    request.getfixturevalue("flushing")
    found = answers(given, threads, **options)
    flushes = float(torch.tensor(1e-39, dtype=torch.float32, device="cpu") * 1) == 0
    torch.set_flush_denormal(False)
    assert flushes, "the program's own mode changed"
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))
