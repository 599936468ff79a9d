"""The autoscaling policy for Ray Serve computes the number of replicas from the requests and their waiting times."""

from types import SimpleNamespace

import pytest

from flashpoint_server.autoscaling import WAITING, OngoingAndWaiting


@pytest.mark.parametrize(
    ("replicas", "requests", "waits", "wanted"),
    [
        (2, 20, [0, 0], 2),  # each replica has ten requests, the target
        (2, 60, [0, 0], 6),
        (2, 5, [0.1, 0.1], 0.5),
        (2, 20, [0.75, 0.75], 3),  # the mean wait is 1.5 times the target
        (2, 20, [1.5, 0], 3),
        (2, 20, [60, 60], 4),  # the policy at most doubles the replicas
        (4, 0, [0, 0, 0, 0], 0),
        (1, 10, None, 1),  # no replica has reported yet
        (0, 0, None, 3),  # without replicas, the policy returns Ray's current target
    ],
)
def test_replicas_are_as_many_as_requests_and_waits_want(replicas, requests, waits, wanted):
    context = SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=3,
        total_num_requests=requests,
        aggregated_metrics=waits and {WAITING: dict(enumerate(waits))},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10),
    )
    assert OngoingAndWaiting(target_seconds=0.5)(context) == (pytest.approx(wanted), {})


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_target_is_positive(seconds):
    with pytest.raises(ValueError, match="target_seconds"):
        OngoingAndWaiting(target_seconds=seconds)
