"""The backend `tiled`: FlashAttention's tile loop in plain torch, on any device. See tiles.py."""

from flashpoint_contract.tensors import EVERY_FEATURE

SUPPORT = EVERY_FEATURE - {"float64", "large_head_dim"}
