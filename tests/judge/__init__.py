"""Tests of `flashpoint_kernels.judge`: a corpus of right and wrong attention kernels, and the verdicts on them."""
