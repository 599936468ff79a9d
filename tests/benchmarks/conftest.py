"""The kernels for Hopper run here, too: install the interpreter of Gluon."""

import pytest

from tests.conftest import DEVICE
from tests.support.kernels import gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process that ends with its parent is forked; JAX, where a test before has imported it, warns of every fork."""
    for item in items:
        if "tests/benchmarks/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"))
