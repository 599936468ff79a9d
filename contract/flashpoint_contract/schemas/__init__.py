"""Models of requests and answers, and tensors as JSON: with pydantic and NumPy, which kernels do not need."""
