"""The server stores the events of a benchmark, so that a client can reconnect and continue after Last-Event-ID."""

import re

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import ask

GRID = {"shapes": [{"q_heads": 2, "q_len": 64, "head_dim": 16}], "max_seconds": 0.05, "warmup_ms": 1.0}


def test_events_go_on_where_a_listener_left_them(server, client):
    run = client.benchmark(**GRID, backends=["cpu", "tiled"])
    run.wait()
    whole = ask(server, f"/benchmark/{run.id}/events").body
    ids = re.findall(rb"^id: (\d+)$", whole, re.MULTILINE)
    middle = ids[len(ids) // 2]
    rest = ask(server, f"/benchmark/{run.id}/events", last_event_id=middle.decode()).body
    assert re.findall(rb"^id: (\d+)$", rest, re.MULTILINE) == ids[len(ids) // 2 + 1 :]
    assert whole.endswith(rest)
