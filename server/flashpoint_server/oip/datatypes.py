"""The protocol's datatype names, and the dtypes to which they correspond."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPE_OF = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "UINT16": "uint16",
    "INT16": "int16",
    "FP16": "float16",
    "BF16": "bfloat16",
    "UINT32": "uint32",
    "INT32": "int32",
    "FP32": "float32",
    "UINT64": "uint64",
    "INT64": "int64",
    "FP64": "float64",
}
DATATYPE_OF = {dtype: datatype for datatype, dtype in DTYPE_OF.items()}


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
