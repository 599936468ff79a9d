"""The kernels for Hopper run here, too: install the interpreter of Gluon."""

from tests.conftest import DEVICE
from tests.support.kernels import gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()
