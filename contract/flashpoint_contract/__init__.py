"""The contract of requests, as data: tensors, options, checked problems and the safetensors head.

Client, kernels and server derive their lists from here. Pure Python: nothing here imports numpy, pydantic or torch.
"""
