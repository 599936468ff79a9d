"""Install the interpreter of Gluon, so that the kernels for Hopper run here, too."""

import pytest

from tests.conftest import DEVICE
from tests.support.kernels import gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore JAX's warnings: guarded processes are forks, and JAX, if another test imported it, warns of each fork."""
    for item in items:
        if "tests/benchmarks/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"))
