"""Materialised attention in float64, the truth that every backend is compared with: formula.py."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE
