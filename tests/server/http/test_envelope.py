"""Each request gets an id, one log line and an answer, even if the server's code raises an unexpected error."""

import os

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")


from tests.support.messages import PROBLEM, ask, post, problem, small

GOOD = small()


def test_a_request_id_is_echoed_when_it_is_sane_and_made_when_not(server):
    assert post(server, "/attention", GOOD, x_request_id="a-b:c.1").headers["x-request-id"] == "a-b:c.1"
    for strange in ("a b", "x" * 129, '"}{'):
        made = problem(post(server, "/attention", b"", x_request_id=strange), 400, "malformed_body")["request_id"]
        assert len(made) == 32
    answer = ask(server, "/nothing", x_request_id="mine")
    assert (answer.headers["x-request-id"], answer.json["request_id"]) == ("mine", "mine")
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.slow
def test_a_bug_of_ours_is_500_with_its_id_in_the_log(gated):
    """An unexpected error of a route (of tests/support/faulty) gives 500, with the request id that is in the log."""
    server = gated.server
    answer = ask(server, "/fail")
    document = problem(answer, 500, "internal_error")
    assert b"unexpected error" not in answer.body
    line = server.wait_for_line(lambda line: line["event"] == "failed" and line["request_id"] == document["request_id"])
    assert "an unexpected error" in line["exception"]
    answer = ask(server, "/typed?number=one")  # the framework refuses this request
    document = problem(answer, 422, "invalid_request")
    assert document["errors"][0]["loc"] == ["number"]
    assert server.get("/health/live")[0] == 200


def test_one_log_line_a_request(server):
    logged, refused = (f"{name}-{os.urandom(4).hex()}" for name in ("logged", "refused"))
    post(server, "/attention", GOOD, x_request_id=logged)
    line = server.wait_for_request(logged)
    assert (line["event"], line["route"], line["status"], line["backend"]) == ("request", "/attention", 200, "cpu")
    assert line["shapes"] == {"q": [2, 3], "k": [2, 3], "v": [2, 3]}
    assert line["bytes_in"] == len(GOOD)
    assert line["bytes_out"] > 24
    assert all(line[f"{part}_ms"] >= 0 for part in ("decode", "queue", "compute", "encode"))
    post(server, "/attention", b"", x_request_id=refused)
    line = server.wait_for_request(refused)
    assert (line["status"], line["code"]) == (400, "malformed_body")
    assert sum(line.get("request_id") == logged for line in server.lines) == 1
