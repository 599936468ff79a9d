import threading

import pytest
from scripted_server import ScriptedServer


@pytest.fixture
def scripted():
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
