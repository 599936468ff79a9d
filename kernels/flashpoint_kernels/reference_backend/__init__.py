"""The float64 reference, with which tests compare all backends: the formula, for a block of queries at a time."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE
