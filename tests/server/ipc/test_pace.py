"""An engine's pace, in predicted seconds per second, is measured, and requests it cannot serve in time are refused."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from flashpoint_server.access import admission as module
from flashpoint_server.access.admission import FEW, PATIENCE, Admission
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.client import WINDOW, ServiceRate
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal

NOW = 1000.0


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW))


def test_a_rate_is_that_of_a_window_without_a_pause():
    pace = ServiceRate()
    pace.begin(100.0)
    pace.did(0.5, 100.0 + WINDOW / 2)
    assert pace.rate == 0
    pace.did(0.5, 100.0 + WINDOW)
    assert pace.rate == 1 / WINDOW
    pace.did(3, 100.0 + 2 * WINDOW)
    assert pace.rate == 2 / WINDOW  # the new window counts half


def test_a_pause_is_no_work_and_tells_no_speed():
    pace = ServiceRate()
    for second in range(5):
        pace.begin(float(second))
        pace.did(7, second + WINDOW / 5)
    assert pace.rate == 0


def test_a_request_that_would_wait_for_too_much_of_its_time_is_refused_at_once():
    admission = Admission(Settings())
    with ExitStack() as inside:
        for _ in range(
            FEW
        ):  # these are admitted at any speed: they keep the engine busy, which measures its speed again
            inside.enter_context(admission.permit(0)).charge(Price(0, 10.0), NOW + 1, 1.0)
        one = inside.enter_context(admission.permit(0))
        wait = FEW * 10
        message = rf"take {wait} s, and the deadline of this one is in {2 * wait - 1} s"
        with pytest.raises(Refusal, match=message) as caught:
            one.charge(Price(0, 10.0), NOW + wait / PATIENCE - 1, 1.0)
        assert caught.value.code == "queue_full"
        one.charge(Price(0, 10.0), NOW + wait / PATIENCE, 1.0)


def test_a_request_that_does_not_wait_for_others_is_let_in():
    admission = Admission(Settings())
    with ExitStack() as inside:
        for _ in range(FEW):
            inside.enter_context(admission.permit(0)).charge(Price(0, 10.0))
        small = inside.enter_context(admission.permit(0))
        small.charge(Price(0, 0.01), NOW + 1, 1.0)  # it goes before large ones
        small.charge(Price(0, 10.0), None, 1.0)  # without a deadline it may wait
        small.charge(Price(0, 10.0), NOW + 1, 0.0)  # unknown speed
        small.charge(Price(0, 10.0), NOW - 1, 1.0)  # late already: 504 when its turn comes
