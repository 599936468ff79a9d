"""Fixtures of the server's tests: servers that several test files share, a client, and files of settings."""

import pytest

from tests.conftest import start_service


@pytest.fixture(scope="session")
def strict():
    """Yield a server with API keys and small limits, which accepts three host names and web pages of one origin.

    Tests must not change its state.
    """
    server = start_service(
        api_keys="all,looker:info,verifier:benchmark+verify",
        body_limit=1 << 20,
        json_limit=65536,
        sequence_limit=8,
        head_limit=4096,
        body_timeout=1,
        body_rate=1000,
        benchmark_jobs=2,
        allowed_hosts="attention.example,*.pods.example",
        cors_origins="https://friend.example",
    )
    yield server
    server.stop()


@pytest.fixture(scope="session")
def cache_server(tmp_path_factory):
    """Yield a server with API keys and little memory for caches. Each test deletes the caches that it creates."""
    from tests.support.caches import started

    server = started(start_service, tmp_path_factory)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def saved_server(tmp_path_factory):
    """Yield a server with API keys and little memory for saved forwards. Each test deletes those that it creates."""
    from tests.support.caches import started_for_saved

    server = started_for_saved(start_service, tmp_path_factory)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server):
    """Yield a client of the SDK for the shared server."""
    import flashpoint

    with flashpoint.Client(server.url) as client:
        yield client


@pytest.fixture
def files(tmp_path):
    """Write settings to a TOML file and to a file of environment variables; return the two paths."""
    (tmp_path / "a.toml").write_text(
        'queue_limit = 1\nkeep_alive = 2\ncors_origins = ["https://a.org", "https://b.org"]\n'
    )
    (tmp_path / "a.env").write_text("export FLASHPOINT_KEEP_ALIVE='3'\n# no\nflashpoint_workers=2\nOTHER=$HOME\n")
    return tmp_path / "a.toml", tmp_path / "a.env"
