"""Tests of the judge: a corpus of right and wrong attention kernels, and the verdicts of the judge."""
