from tests.e2e.conftest import server, start_server  # noqa: F401
