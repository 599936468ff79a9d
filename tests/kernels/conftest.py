"""The instruction sets of the kernels in C; and where Triton interprets, the interpreter of Gluon, and a faster one."""

import pytest

from flashpoint_kernels import native
from tests.conftest import DEVICE
from tests.support.kernels import fast_interpreter, gluon_interpreter

if DEVICE == "cpu":
    gluon_interpreter.install()
    fast_interpreter.install()

FOUND = native.library()
LEVELS = ["v3", "v4"][: max(1, int(FOUND.level[1]) - 2)] if FOUND and FOUND.level in ("v3", "v4") else ["v1"]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, which the kernels then use."""
    functions = native.level(request.param)
    assert functions is not None
    monkeypatch.setattr(native, "library", lambda: functions)
    return str(request.param)
