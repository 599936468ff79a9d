"""Safetensors and JSON: bytes to tensors and options, and back."""
