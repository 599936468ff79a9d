"""Layers of flash-attn: the rotary position embedding."""
