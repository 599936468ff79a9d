"""A fixture changes how tests store caches."""

import pytest


@pytest.fixture(scope="module")
def in_slabs():
    """Put full chunks into slabs, although the chunks are small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flashpoint_server.engine.caches.chunks.LEAST_BYTES", 0)
        yield
