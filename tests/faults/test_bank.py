"""The bank of faults fits the sources, so that `make faults` can put each fault in."""

from tests.faults.__main__ import bank, mistakes


def test_at_least_120_faults_fit() -> None:
    faults = bank()
    wrong = mistakes(faults)
    assert len(faults) - len(wrong) >= 120, "\n".join(wrong)
