"""The formats of requests and answers, safetensors and JSON: convert bytes to tensors and options, and back."""
