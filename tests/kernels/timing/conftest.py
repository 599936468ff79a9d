"""A fixture that replaces the time that the clocks read."""

import pytest

from flashpoint_kernels.timing import clock, device
from tests.support.kernels.simulated_time import Time


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Replace the time that the clocks read by a simulated time."""
    made = Time()
    monkeypatch.setattr(clock, "perf_counter", made.seconds)
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: round(made.seconds() * 1e9))
    # With known peaks, the tests do not measure peaks with the simulated time.
    monkeypatch.setattr(device, "_copies", {"cpu": 1.0})
    monkeypatch.setattr(device, "_products", {("cpu", "float32"): 1.0})
    return made
