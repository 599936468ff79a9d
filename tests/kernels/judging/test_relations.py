"""A right kernel passes every check in `relations`, each of which compares the answers of several calls."""

from __future__ import annotations

import pytest

import flashpoint_kernels
from tests.judge.corpus import RIGHT


@pytest.mark.slow
def test_a_right_kernel_keeps_every_relation():
    """A right kernel passes all cases and relations in float32, also the relations that need several shapes."""
    report = flashpoint_kernels.judge(RIGHT["half_weights"], quick=True, dtype="float32", seed=4)
    assert report.verdict == "right", report.lines()
    assert report.race is not None
    assert report.calls > report.cases > 100
