"""Views and copies of sequences in a packed tensor are equal, and a sequence's keys are read from the right pages."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_contract.options import Options
from flashpoint_contract.spec import Row
from flashpoint_kernels import Problem
from flashpoint_kernels.problems import sequences
from tests.support.kernels.solving import normal


def rows_at(places: list[int], length: int, gap: int) -> list[Row]:
    """Return a `Row` for each number in `places`: sequence n of a packed tensor starts at row n·(length + gap)."""
    starts = [n * (length + gap) for n in places]
    return [Row(n, 0, at, length, length, at, length, length, 0) for n, at in zip(places, starts, strict=True)]


@given(
    count=st.integers(1, 5), length=st.integers(1, 4), name=st.sampled_from(["q", "k", "lse"]), seed=st.integers(0, 9)
)
def test_a_view_of_neighbours_is_their_copy(count: int, length: int, name: str, seed: int) -> None:
    view = normal(1, 2, count * length, *(() if name == "lse" else (3,)), seed=seed)
    rows = rows_at(list(range(count)), length, 0)
    assert sequences.consecutive(rows)
    viewed = sequences.viewed(name, view, rows)
    assert torch.equal(viewed, sequences.gathered(name, view, rows))
    assert viewed.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()


@given(places=st.permutations(range(4)), count=st.integers(1, 4), length=st.integers(1, 3), gap=st.integers(0, 2))
def test_what_was_gathered_is_scattered_to_its_places(places: list[int], count: int, length: int, gap: int) -> None:
    view = normal(1, 2, 4 * (length + gap), 3)
    before, rows = view.clone(), rows_at(places[:count], length, gap)
    copied = sequences.gathered("q", view, rows)
    for n, row in enumerate(rows):
        assert torch.equal(copied[n], before[0, :, row.q_start : row.q_start + length])
    sequences.scatter("q", view, rows, copied + 1)
    for row in rows:
        before[0, :, row.q_start : row.q_start + length] += 1
    assert torch.equal(view, before)


@given(
    size=st.integers(1, 5), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3), seed=st.integers(0, 99),
    layout=st.sampled_from(["bhsd", "bshd"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_keys_come_out_of_pages_one_by_one(size: int, lengths: list[int], seed: int, layout: str) -> None:
    pool, width = 7, -(-12 // size)
    k = normal(pool, 2, size, 3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, pool, (len(lengths), width), generator=generator, dtype=torch.int32)
    q = normal(len(lengths), 2, 1, 3)
    tensors = {"q": q, "k": k, "v": k, "block_table": table, "kv_lengths": torch.tensor(lengths)}
    if layout == "bshd":
        tensors |= {name: tensors[name].transpose(1, 2) for name in "qkv"}
    problem = Problem.create(tensors, Options(layout=layout))  # type: ignore[arg-type]
    for row, x in problem.sequences():
        expected = [k[int(table[row.index, j // size]), :, j % size] for j in range(row.kv_len)]
        assert torch.equal(x["k"], torch.stack(expected, 1) if expected else k.new_zeros(2, 0, 3))
