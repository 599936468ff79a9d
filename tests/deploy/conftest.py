from tests.e2e.conftest import start_server  # noqa: F401
