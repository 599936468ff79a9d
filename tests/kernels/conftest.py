"""Where Triton interprets: install the interpreter of Gluon, and make Triton's faster."""

from tests.conftest import DEVICE
from tests.support.kernels import fast_interpreter, gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()
    fast_interpreter.install()
