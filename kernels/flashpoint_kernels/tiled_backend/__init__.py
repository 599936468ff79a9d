"""FlashAttention's tile loop in plain torch, on any device, as a backend: tiles.py."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE - {"float64", "large_head_dim"}
