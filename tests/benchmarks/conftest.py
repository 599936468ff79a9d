"""Install the interpreter for Gluon (tests/support), so that the kernels for Hopper run on the CPU."""

import pytest

from tests.conftest import DEVICE
from tests.support.kernels import gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore JAX's warning about forks: `preexec_fn` in suites.py forks, and another test may have imported JAX."""
    for item in items:
        if "tests/benchmarks/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"))
