"""`Work` gives shards to idle servers in the right order, and retries failed and late ones. No server is needed."""

from types import SimpleNamespace

import pytest

from flashpoint._shards import work as module
from flashpoint._shards.work import Work
from flashpoint.errors import DeadlineExceededError, OverloadedError, ServerError

FULL = OverloadedError("full", status=429)
CRASHED = ServerError("crashed", status=500)


NOW = 1000.0


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW))


def work(questions=1, servers=2, retries=1, seconds=60.0):
    items = [SimpleNamespace(shard=SimpleNamespace(pairs=pairs)) for pairs in range(questions)]
    return Work(items, servers, retries, None if seconds is None else NOW + seconds)


def half_time_is_over(item):
    item.late = NOW


def test_another_server_has_a_question_from_half_time_on():
    one = work()
    item = one.take(0)
    assert one.patience(1) == 30
    assert one.take(1) is None
    half_time_is_over(item)
    assert one.patience(1) == 0
    assert one.take(0) is None
    assert one.take(1) is item
    assert item.late == NOW + 30  # the time when a third server may get this item


def test_what_waits_comes_first():
    two = work(questions=2)
    half_time_is_over(two.take(0))
    assert two.take(1).question.shard.pairs == 0


def test_without_a_timeout_nobody_is_late():
    one = work(seconds=None)
    one.take(0)
    assert one.patience(1) is None
    assert one.take(1) is None


def test_of_two_answers_the_first_counts_once():
    two = work(questions=2)
    item = two.take(0)
    other = two.take(1)
    half_time_is_over(item)
    two.done(1, other, "other")
    assert two.take(1) is item
    two.done(1, item, "first")
    assert two.over
    two.done(0, item, "second")
    assert (item.answer, item.server) == ("first", 1)
    assert two.over


@pytest.mark.parametrize("error", [FULL, CRASHED])
def test_who_fails_what_another_has_answered_harms_nobody(error):
    one = work(retries=0)
    item = one.take(0)
    half_time_is_over(item)
    assert one.take(1) is item
    one.done(1, item, "answer")
    assert one.failed(0, item, error) > 0
    assert item.failures == 0
    assert one.over


def test_an_error_that_no_other_server_mends_is_raised():
    one = work()
    with pytest.raises(ServerError):
        one.failed(0, one.take(0), CRASHED)


def test_a_question_that_another_still_has_does_not_wait_as_well():
    one = work()
    item = one.take(0)
    half_time_is_over(item)
    assert one.take(1) is item
    one.failed(1, item, FULL)
    assert one.take(1) is None
    half_time_is_over(item)
    assert one.take(1) is item  # server 0, which has this item, has not answered yet
    one.failed(1, item, FULL)
    one.failed(0, item, FULL)
    assert one.take(0) is item
    with pytest.raises(OverloadedError):
        one.failed(0, item, FULL)  # the fourth failure: two at each of the two servers


def test_the_deadline_ends_the_waiting():
    one = work(seconds=-1)
    with pytest.raises(DeadlineExceededError):
        one.patience(0)


def test_a_server_rests_as_long_as_it_asks_for_and_at_most_to_the_deadline():
    one = work(seconds=60)
    asks = OverloadedError("full", status=429, retry_after=20)
    assert 20 <= one.failed(0, one.take(0), asks) <= 20.5
    asks.retry_after = 61
    assert one.failed(1, one.take(1), asks) == 60


def test_servers_that_ask_for_the_same_rest_are_asked_again_at_different_times():
    many = work(questions=20, servers=20)
    asks = OverloadedError("full", status=429, retry_after=1)
    rests = {many.failed(server, many.take(server), asks) for server in range(20)}
    assert all(1 <= rest <= 1.5 for rest in rests)
    assert len(rests) == 20
