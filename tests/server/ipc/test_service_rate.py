"""An engine's speed is the average of measurements. An engine that pauses is not measured."""

from flashpoint_server.ipc.service_rate import WINDOW, ServiceRate


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
