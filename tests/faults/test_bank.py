"""The bank of faults fits the sources, so that `make faults` can put each fault in."""

from tests.faults.__main__ import BANKS, bank, mistakes


def test_at_least_nine_in_ten_faults_fit() -> None:
    faults = [fault for files in BANKS.values() for fault in bank(files)]
    wrong = mistakes(faults)
    assert len(wrong) <= len(faults) // 10, "\n".join(wrong)
