"""The float64 reference with the score matrix in memory, with which all backends are compared: see formula.py."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE
