"""Where kernels run in tests: under Triton's interpreter, or on a GPU when FLASHPOINT_TEST_DEVICE=cuda (`make gpu`).

Set before anything imports triton, which decides when a kernel is decorated.
"""

import os

DEVICE = os.environ.get("FLASHPOINT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
