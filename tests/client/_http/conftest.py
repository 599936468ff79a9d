import os

import pytest


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """Hide the proxies that the environment of the tests names."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
