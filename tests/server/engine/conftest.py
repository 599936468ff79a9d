"""The memory of caches in tests."""

import pytest


@pytest.fixture(scope="module")
def in_slabs():
    """Put whole chunks into slabs, although they are small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flashpoint_server.engine.caches.chunks.LEAST_BYTES", 0)
        yield
