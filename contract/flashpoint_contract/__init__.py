"""The contract of requests as data: tensors, options, checked problems and the safetensors head.

Client, kernels and server derive their lists from it. Pure Python: it does not import numpy, pydantic or torch.
"""
