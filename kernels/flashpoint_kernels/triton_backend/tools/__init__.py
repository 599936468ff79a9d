"""Tools for the kernels: compile for absent GPUs, inspect PTX and SASS, compile before the first call."""
