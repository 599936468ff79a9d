"""The fixture `in_slabs`, with which small test caches are stored as large ones are."""

import pytest


@pytest.fixture(scope="module")
def in_slabs():
    """Let caches put full chunks into slabs, although the chunks of the tests are too small for this."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flashpoint_server.engine.caches.chunks.LEAST_BYTES", 0)
        yield
