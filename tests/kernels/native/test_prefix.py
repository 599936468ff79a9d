"""Sequences that share pages read these pages once, and each sequence has the same bits as alone."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashpoint_kernels.native import prefix
from flashpoint_kernels.native.rows import CHUNK
from tests.support.kernels.shared_pages import check

F8 = torch.float8_e4m3fn


@given(
    keys=st.lists(st.tuples(st.sampled_from([0, 1000, CHUNK, 2 * CHUNK, 2100]), st.integers(1, 1200)), min_size=2,
                  max_size=5),
    first=st.sampled_from([CHUNK, 2500]), page=st.sampled_from([16, 100, 256, CHUNK]), q_len=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from([None, None, torch.int8, F8]),
    options=st.sampled_from([{}, {}, {"softcap": 2.0}, {"window": (1500, 0)}, {"window": (30, -1)}]),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sequences_of_a_tree_have_the_bits_of_each_alone(
    level: str, keys: list[tuple[int, int]], first: int, page: int, q_len: int, group: int, dtype: torch.dtype,
    kind: torch.dtype | None, options: dict[str, Any],
) -> None:  # fmt: skip
    shared, separate = ([pair[n] for pair in keys] for n in range(2))
    check([0, *shared], [first, *separate], page, q_len, group, dtype, kind, **options)


def test_shared_pages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[prefix.SharedPrefix] = []
    create = prefix.SharedPrefix

    def recorded(*fields: Any) -> prefix.SharedPrefix:
        made.append(create(*fields))
        return made[-1]

    monkeypatch.setattr(prefix, "SharedPrefix", recorded)
    check([0, 2048, 2100, 1024], [2500, 3, 1, 40], 64, 1, 3, torch.float32, None)
    (shared,) = made
    assert [(run.start, run.stop, run.last - run.first) for run in shared.runs] == [
        (0, CHUNK, 4), (CHUNK, 2 * CHUNK, 3)
    ]  # fmt: skip
