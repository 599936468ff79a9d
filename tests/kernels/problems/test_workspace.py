"""The workspace for stored dS is predicted from a problem's head, and its settings are checked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import Options, Problem
from flashpoint_kernels.problems import workspace
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import grouped, launch
from tests.support.kernels.hopper import ON_SM_90
from tests.support.kernels.solving import qkv, spec_of


def spec(q: tuple[int, ...], k: tuple[int, ...], dtype: str = "bfloat16", **options: object) -> Spec:
    shapes = {"q": q, "k": k, "v": k, "do": q}
    return plan({name: TensorInfo(dtype, shape) for name, shape in shapes.items()}, Options(**options), "backward")


def test_a_workspace_is_the_smaller_of_the_setting_and_all_of_ds() -> None:
    long, gib = spec((2, 8, 4096, 128), (2, 4, 4096, 128)), 1 << 30
    of_key_head = 2 * 2 * 4096 * 4096
    assert workspace.workspace_of(long, gib) == 8 * of_key_head < gib
    assert workspace.workspace_of(long, 3 * of_key_head) == 3 * of_key_head
    assert workspace.workspace_of(long, 1) == of_key_head
    odd = spec((1, 1, 65, 64), (1, 1, 129, 64))
    assert workspace.workspace_of(odd, gib) == 2 * 256 * 256


def test_other_problems_have_none() -> None:
    q = (1, 2, 4096, 64)
    assert workspace.workspace_of(spec(q, q), 1 << 30)
    assert not workspace.workspace_of(spec(q, q, "float32"), 1 << 30)
    assert not workspace.workspace_of(spec(q, q, window=(9, 9)), 1 << 30)
    assert not workspace.workspace_of(spec((1, 2, 4096, 257), (1, 2, 4096, 257)), 1 << 30)
    assert not workspace.workspace_of(spec((1, 1, 1 << 16, 64), (1, 1, 1 << 16, 64)), 1 << 30), "over MOST"
    forward = plan({name: TensorInfo("float16", q) for name in "qkv"}, Options(), "forward")
    assert not workspace.workspace_of(forward, 1 << 30)


@ON_SM_90
@pytest.mark.usefixtures("stores_ds")
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=3),
    heads=st.integers(1, 3), group=st.integers(1, 2), ragged=st.booleans(), most=st.sampled_from([1, 1 << 18, 1 << 30]),
    hopper=st.booleans(),
)  # fmt: skip
def test_no_launch_needs_more_than_was_predicted(
    lengths: list[tuple[int, int]], heads: int, group: int, ragged: bool, most: int, hopper: bool
) -> None:
    q, k = torch.tensor(lengths).T
    totals = (1, int(q.sum()), int(k.sum())) if ragged else (len(lengths), int(q.max()), int(k.max()))
    tensors = qkv(totals[0], heads * group, *totals[1:], 16, kv_heads=heads, dtype=torch.float16)
    options = Options()
    if ragged:
        tensors = {name: t[0].transpose(0, 1).contiguous() for name, t in tensors.items()}
        tensors |= {f"cu_seqlens_{name}": torch.cat([n.new_zeros(1), n.cumsum(0)]) for name, n in (("q", q), ("k", k))}
        options = Options(layout="thd")
    else:
        tensors |= {"q_lengths": q, "kv_lengths": k}
    problem = Problem.create(tensors, options, "backward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(workspace.BYTES, str(most))
        patch.setenv("FLASHPOINT_HOPPER", str(int(hopper)))
        allocated = []
        for each in grouped.launches(with_forwards([problem])[1], [{}], None):
            launch._stored(each)
            _ = each.table
            allocated.append(each.pieces.workspace.nbytes if each.pieces is not None else 0)
    assert sum(allocated) <= workspace.workspace_of(spec_of(tensors, options, "backward"), most)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(workspace.BYTES, raising=False)
    assert workspace.limit() == workspace.DEFAULT == 1 << 30
    for value, size in (("", 1 << 30), ("4096", 4096), ("512MiB", 512 << 20), (" 2 GiB ", 2 << 30)):
        monkeypatch.setenv(workspace.BYTES, value)
        assert workspace.limit() == size
    for value, message in (("0", "at least 1"), ("-1", "must be bytes"), ("1.5GiB", "must be bytes"), ("GiB", "4GiB")):
        monkeypatch.setenv(workspace.BYTES, value)
        with pytest.raises(ValueError, match=f"{workspace.BYTES} .*{message}"):
            workspace.limit()
