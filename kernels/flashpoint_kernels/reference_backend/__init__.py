"""Materialised attention in float64, with which all backends are compared: formula.py."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE
