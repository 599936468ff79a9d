"""The kernels in Triton, and the functions that they call."""
