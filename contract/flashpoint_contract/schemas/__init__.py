"""Models of requests and answers, and tensors as JSON: this package needs pydantic and NumPy; kernels do not use it."""
