"""The fixture `job`, a finished benchmark whose events several test files read."""

import json

import pytest


@pytest.fixture(scope="module")
def job(server):
    """Run a short benchmark to its end, and return its path, /benchmark/ID."""
    from tests.support.messages import JSON, ask, post
    from tests.support.servers import wait_for

    grid = {"shapes": [{"q_len": 16, "head_dim": 16}], "max_seconds": 0.01, "backends": ["cpu"]}
    path = post(server, "/benchmark", json.dumps(grid).encode(), JSON).headers["location"]
    wait_for(lambda: ask(server, path).json["state"] == "done", lambda: "the benchmark goes on")
    return path
