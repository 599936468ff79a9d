"""The contract of requests as data: tensors, options, checked problems and the safetensors head.

Client, kernels and server derive their lists from this package. It does not import numpy, pydantic or torch, except in
`schemas`.
"""
