"""The machine's name and the versions of packages are read without torch."""

import subprocess
import sys

import numpy as np

from flashpoint_kernels.dispatching import machine


def test_versions_are_those_of_the_packages() -> None:
    assert machine.version_of("numpy") == np.__version__
    assert machine.version_of("no-such-package") is None


def test_the_processor_has_a_name_of_one_line() -> None:
    name = machine.cpu_name()
    assert name == name.strip() != ""
    assert "\n" not in name


def test_neither_imports_torch() -> None:
    code = (
        "import sys; from flashpoint_kernels.dispatching import machine\n"
        "machine.cpu_name(), machine.version_of('torch'); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
