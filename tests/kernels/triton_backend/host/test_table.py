"""With the addresses and strides in a launch's table of sequences, a kernel finds each element of each tensor."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.triton_backend.host.table import SHAPE, Table
from flashpoint_kernels.triton_backend.kernels import columns as col
from tests.support.kernels.solving import MEMORY, normal, restrided

PLACES = {"q": col.Q, "k": col.K, "v": col.V}


def number_at(address: int) -> float:
    return ctypes.c_float.from_address(address).value


@given(
    layout=st.sampled_from(["bhsd", "bshd", "thd"]), seed=st.integers(0, 99),
    how=st.sampled_from(MEMORY),
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_every_number_of_a_sequence_is_where_its_row_says(
    layout: str, seed: int, how: str, lengths: list[tuple[int, int]]
) -> None:
    q_lens, kv_lens = zip(*lengths, strict=True)
    tensors = {}
    for n, (name, heads, own) in enumerate((("q", 4, q_lens), ("k", 2, kv_lens), ("v", 2, kv_lens))):
        shape = {"bhsd": (len(own), heads, max(own), 6), "bshd": (len(own), max(own), heads, 6)}
        t = normal(*shape.get(layout, (sum(own), heads, 6)), seed=seed + n).cpu()
        tensors[name] = restrided(t, how)
    index = {"q": torch.tensor([0, *q_lens]).cumsum(0), "k": torch.tensor([0, *kv_lens]).cumsum(0)}
    if layout == "thd":
        tensors |= {f"cu_seqlens_{name}": edges for name, edges in index.items()}
    else:
        tensors |= {"q_lengths": torch.tensor(q_lens), "kv_lengths": torch.tensor(kv_lens)}
    problem = Problem.create(tensors, Options(layout=layout, window=(3, 1)))  # type: ignore[arg-type]
    table = Table(problem, {})
    assert table.ints.shape == (len(lengths), col.WIDTH.value)
    for row, (spec_row, x) in zip(table.ints, problem.sequences(), strict=True):
        assert row[SHAPE].tolist() == [
            spec_row.q_len, spec_row.q_rows, spec_row.kv_len, spec_row.kv_rows, spec_row.offset, 3, 1, 4, 2,
        ]  # fmt: skip
        for name, place in PLACES.items():
            base, head, stride = row[place.value : place.value + 3].tolist()
            for h, i, d in np.ndindex(*x[name].shape):
                assert number_at(base + 4 * (h * head + i * stride + d)) == float(x[name][h, i, d])


@pytest.mark.parametrize(
    ("tensors", "aligned", "describable"),
    [
        ({}, True, True),
        ({"k": normal(1, 2, 40, 20, dtype=torch.float16)[..., :16]}, False, False),  # rows 40 bytes apart
        ({"k": normal(1, 2, 1, 16, dtype=torch.float16).expand(1, 2, 40, 16)}, True, False),  # rows share memory
        ({"v": normal(1, 1, 40, 16, dtype=torch.float16).expand(1, 2, 40, 16)}, True, True),  # key heads may share rows
        ({"q": normal(1, 1, 40, 16, dtype=torch.float16).expand(1, 2, 40, 16)}, True, False),  # query heads may not
    ],
)
def test_the_copy_engine_takes_rows_that_it_can_describe(
    tensors: dict[str, torch.Tensor], aligned: bool, describable: bool
) -> None:
    plain = {name: normal(1, 2, 40, 16, dtype=torch.float16, seed=n) for n, name in enumerate("qkv")}
    table = Table(Problem.create(plain | tensors, Options()), {})
    assert (table.aligned, table.describable) == (aligned, describable)


def test_a_seed_of_64_bits_and_its_threshold_are_in_the_table() -> None:
    t = dict.fromkeys("qkv", normal(1, 1, 3, 16))
    for seed, p in ((2**64 - 5, 0.9), (3, 2.0**-20)):
        table = Table(Problem.create(t, Options(dropout_p=p, dropout_seed=seed)), {})
        assert int(table.ints[0, col.SEED.value]) % 2**64 == seed
        assert (int(table.ints[0, col.DROP_BELOW.value]) - 1) / 2**32 < p <= table.ints[0, col.DROP_BELOW.value] / 2**32
        assert table.floats[0, col.KEEP_SCALE.value] == np.float32(1 / (1 - p))
