"""Where kernels run in tests: under Triton's interpreter, or on a GPU when FLASHPOINT_TEST_DEVICE=cuda (`make gpu`).

Set before anything imports triton, which decides when a kernel is decorated.
"""

import os

DEVICE = os.environ.get("FLASHPOINT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# torch's threads sleep while they wait, as those of an engine do. Beside other work on two cores, spinning made the
# 12 s of processor time that some tests of the kernels take 99. Set before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
