"""Run a function in a forked process."""

import os
import pickle
import traceback

import pytest

# JAX warns at each fork of a process that has imported it, which another test of the process may have done.
BESIDE_JAX = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*_at_fork:pytest.PytestUnraisableExceptionWarning"),
]


class Child:
    """A forked process that runs `function`. `result()` waits for its end, and returns what the function returned."""

    def __init__(self, function):
        self._end, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:  # never returns to pytest
            try:
                try:
                    found = True, function()
                except BaseException:
                    found = False, traceback.format_exc()
                with open(out, "wb") as file:
                    file.write(pickle.dumps(found))
            finally:
                os._exit(0)
        os.close(out)

    def result(self):
        with open(self._end, "rb") as file:
            found = file.read()
        os.waitpid(self.pid, 0)
        good, value = pickle.loads(found)
        assert good, value
        return value


def in_child(function):
    return Child(function).result()
