"""Tests of the judge: a corpus of right and wrong attention kernels, and what the judge says about them."""
