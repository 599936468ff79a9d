"""The Triton kernels for Hopper (TMA descriptors, warp roles) are right, and run for the problems that fit them."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, verify
from tests.conftest import DEVICE
from tests.support.kernels.hopper import HALF, ON_SM_90, TILES, backward_kernels, kernels
from tests.support.kernels.triton_cases import name_of, options_of, tensors_of

pytestmark = ON_SM_90

THD = max(70, 3 * TILES.few_queries + 3)  # Sq in thd: each sequence that has queries has too many for packed blocks
CASES = [
    (HALF, 70, 90),
    (HALF, 130, 96),  # only whole tiles
    (HALF | {"dtype": "bfloat16", "band": "causal", "group": 2}, 70, 130),
    (HALF | {"band": "top_left", "layout": "bshd", "dims": (24, 40), "dlse": True}, 70, 45),
    (HALF | {"layout": "bshd", "group": 2, "dtype": "bfloat16"}, 70, 33),
    (HALF | {"dims": (160, 160)}, 70, 70),
    (HALF | {"band": "causal", "lengths": True, "dims": (64, 64)}, 66, 99),
    (HALF | {"band": "causal", "layout": "thd", "dtype": "bfloat16", "group": 2}, THD, 66),
]
FAST = (0, 7)


@pytest.mark.usefixtures("hopper_path")
@pytest.mark.parametrize(
    ("case", "q_len", "kv_len"),
    [pytest.param(*case, marks=[] if n in FAST else pytest.mark.slow) for n, case in enumerate(CASES)],
    ids=lambda x: name_of(x) if isinstance(x, dict) else None,
)
def test_answers(case: dict[str, Any], q_len: int, kv_len: int) -> None:
    tensors = tensors_of(case, q_len, kv_len)
    assert kernels(tensors, options_of(case)) == ["attention_forward_hopper"]
    of_hopper = "" if case["dims"] == (160, 160) else "_hopper"  # these gradients would need too many registers
    assert backward_kernels(tensors, options_of(case)) == [
        "attention_delta", f"attention_backward_kv{of_hopper}", f"attention_backward_q{of_hopper}",
    ]  # fmt: skip
    report = verify(tensors, options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.usefixtures("hopper_path")
def test_what_the_copy_engine_cannot_take_goes_through_pointers() -> None:
    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape).half().to(DEVICE)

    fine = {"q": one(1, 2, 70, 16), "k": one(1, 2, 70, 16), "v": one(1, 2, 70, 16)}
    assert kernels(fine, Options()) == ["attention_forward_hopper"]
    assert kernels({**fine, "v": one(1, 1, 70, 16).expand(1, 2, 70, 16)}, Options()) == ["attention_forward_hopper"]
    for tensors, options in (
        ({**fine, "k": one(1, 2, 70, 20)[..., :16]}, Options()),  # rows 40 bytes apart
        ({**fine, "k": one(1, 2, 1, 16).expand(1, 2, 70, 16)}, Options()),  # all rows share memory
        ({**fine, "q": one(1, 1, 70, 16).expand(1, 2, 70, 16)}, Options()),  # all heads share memory
        (fine, Options(window=(5, 5))),  # only the general kernels have windows
        (fine, Options(scale=-1.0)),
        ({name: t.float() for name, t in fine.items()}, Options()),
    ):
        assert kernels(tensors, options) == ["attention_forward"]
    split = {"q": one(1, 2, 5, 16), "k": one(1, 2, 1100, 16), "v": one(1, 2, 1100, 16)}
    assert kernels(split, Options()) == ["attention_forward", "merge_parts"]


def test_it_is_on_unless_0_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.ones((1, 1, 70, 16), dtype=torch.float16, device=DEVICE) for name in "qkv"}
    for value, path in (
        ("", "attention_forward_hopper"),
        ("0", "attention_forward"),
        ("1", "attention_forward_hopper"),
    ):
        monkeypatch.setenv("FLASHPOINT_HOPPER", value)
        assert kernels(tensors, Options()) == [path]
    monkeypatch.setenv("FLASHPOINT_HOPPER", "yes")
    with pytest.raises(ValueError, match="FLASHPOINT_HOPPER must be 0 or 1, not 'yes'"):
        kernels(tensors, Options())
    monkeypatch.setenv("FLASHPOINT_HOPPER", "1")
    monkeypatch.setenv("FLASHPOINT_TWO_SETS", "no")
    with pytest.raises(ValueError, match="FLASHPOINT_TWO_SETS must be 0 or 1, not 'no'"):
        kernels(tensors, Options())
