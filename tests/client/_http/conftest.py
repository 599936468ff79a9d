import os

import pytest


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """Unset the environment variables that name proxies, such as HTTP_PROXY."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
