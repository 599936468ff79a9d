"""The engine's queue orders requests by rank, batches those with equal launch keys, and limits a batch's wait."""

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from flashpoint_server.engine.scheduling.waiting import Budget, Waiting


@dataclass(eq=False)
class Item:
    rank: float = 0.0
    key: str | None = "a"
    flops: int = 1
    nbytes: int = 1
    arrived: float = 0.0


def waiting(*items, flops=1 << 60, nbytes=1 << 60, delay=0.0):
    queue = Waiting(Budget(flops, nbytes, delay))
    for item in items:
        queue.put(item)
    return queue


def test_equals_keep_their_order_and_ranks_theirs():
    items = [Item(1.0, None), Item(0.0, None), Item(1.0, None)]
    queue = waiting(*items)
    assert [queue.take(0.0) for _ in range(4)] == [[items[1]], [items[0]], [items[2]], []]


def test_a_batch_is_of_one_key_and_the_first_of_all_leads_it():
    a, b, other, last = Item(3.0), Item(1.0), Item(2.0, "b"), Item(4.0)
    queue = waiting(a, b, other, last)
    assert queue.take(0.0) == [b, a, last]
    assert queue.take(0.0) == [other]
    assert not queue.items


def test_what_runs_by_itself_goes_on_while_no_launch_may_begin():
    grouped, alone = Item(0.0), Item(1.0, None)
    queue = waiting(grouped, alone)
    assert queue.take(0.0, lambda item: item.key is None) == [alone]
    assert queue.take(0.0, lambda item: item.key is None) == []
    assert queue.take(0.0) == [grouped]


def test_an_item_that_may_not_begin_is_passed():
    long, short = Item(0.0, None, flops=9), Item(1.0, None)
    queue = waiting(long, short)
    assert queue.take(0.0, lambda item: item.flops == 1) == [short]
    assert queue.take(0.0, lambda item: item.flops == 1) == []
    assert queue.take(0.0) == [long]


def test_a_budget_closes_a_batch_and_what_is_over_it_runs_alone():
    items = [Item(float(n), flops=40) for n in range(5)]
    assert waiting(*items, flops=100).take(0.0) == items[:2]
    assert waiting(*items, flops=10).take(0.0) == items[:1]
    assert waiting(*items, flops=200).take(0.0) == items
    big = [Item(float(n), nbytes=60) for n in range(3)]
    assert waiting(*big, nbytes=120).take(0.0) == big[:2]


def test_a_batch_waits_for_others_until_its_oldest_has_waited_or_it_is_full():
    first, second = Item(0.0, arrived=10.0, flops=5), Item(-1.0, arrived=11.0, flops=5)
    queue = waiting(first, delay=2.0, flops=12)
    assert (queue.take(11.9), queue.closes()) == ([], 12.0)
    queue.put(second)
    assert (queue.take(11.9), queue.closes()) == ([], 12.0)
    queue.put(third := Item(5.0, arrived=11.5, flops=5))  # does not fit into the batch of the other two
    assert queue.take(11.9) == [second, first]
    assert queue.closes() == 13.5
    assert queue.take(13.5) == [third]
    assert queue.closes() == math.inf


def test_a_batch_that_waits_holds_up_nothing_else():
    patient, alone = Item(0.0, arrived=10.0), Item(9.0, None)
    other = Item(8.0, "b", arrived=5.0)
    queue = waiting(patient, alone, other, delay=2.0)
    assert [queue.take(10.0) for _ in range(3)] == [[other], [alone], []]


def test_the_fill_is_the_larger_part_of_the_two_budgets():
    budget = Budget(100, 1000, 0.0)
    assert budget.fill([Item(flops=20, nbytes=100), Item(flops=5, nbytes=700)]) == 0.8
    assert budget.fill([Item(flops=500)]) == 1.0


@given(st.lists(st.tuples(st.floats(0, 9), st.sampled_from([None, "a", "b"]), st.integers(1, 50))), st.integers(1, 99))
def test_all_that_is_put_in_comes_out_once_within_budget_and_none_before_a_better_one_of_its_key(shapes, budget):
    items = [Item(rank, key, flops) for rank, key, flops in shapes]
    queue, out = waiting(*items, flops=budget), []
    while batch := queue.take(0.0):
        assert len({item.key for item in batch}) == 1
        assert len(batch) == 1 or sum(item.flops for item in batch) <= budget
        out.extend(batch)
    assert sorted(map(id, out)) == sorted(map(id, items))
    for key in (None, "a", "b"):
        ranks = [item.rank for item in out if item.key == key]
        assert ranks == sorted(ranks)
