"""Run a function in a forked process."""

import os
import pickle
import traceback

import numpy as np
import pytest

# JAX warns at each fork of a process that has imported it, and another test may have imported it.
BESIDE_JAX = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*_at_fork:pytest.PytestUnraisableExceptionWarning"),
]

FORKING = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    *BESIDE_JAX,
]
SIZES = {"layers": 1, "kv_heads": 2, "head_dim": 16}  # the shape of a KV cache


def tokens(seed, count=3):
    """Return `count` random keys or values for a KV cache with SIZES. Equal seeds give equal numbers."""
    return np.random.default_rng(seed).standard_normal((1, 2, count, 16), dtype=np.float32)


class Child:
    """A forked process that runs `function`; `result()` waits, and returns its result or fails with its traceback."""

    def __init__(self, function):
        self._end, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:  # never returns to pytest
            try:
                try:
                    outcome = True, function()
                except BaseException:
                    outcome = False, traceback.format_exc()
                with open(out, "wb") as file:
                    file.write(pickle.dumps(outcome))
            finally:
                os._exit(0)
        os.close(out)

    def result(self):
        with open(self._end, "rb") as file:
            data = file.read()
        os.waitpid(self.pid, 0)
        good, value = pickle.loads(data)
        assert good, value
        return value


def in_child(function):
    return Child(function).result()
