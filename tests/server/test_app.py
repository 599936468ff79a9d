"""The application answers its routes; other paths get 404, and wrong methods 405."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import ask, post, problem, small

GOOD = small()


def test_unknown_addresses_404_and_methods_405(server):
    for path in ("/nothing", "/attention/", "/attention/grad/x"):
        problem(post(server, path, GOOD), 404, "not_found")
    for path, near in (
        ("/atention", "/attention"),
        ("/metric", "/metrics"),
        ("/cache/fork", "/caches/fork"),
        ("/openapi", "/openapi.json"),
    ):
        assert f"did you mean {near}?" in ask(server, path).json["detail"]
    answer = ask(server, "/attention")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = post(server, "/health/live", b"")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"
    for path in ("/attention", "/benchmark/none/events"):  # no GET; a GET that answers with a stream of events
        assert ask(server, path, "HEAD").status == 405


@pytest.mark.parametrize("path", ["/", "/info", "/health/live", "/metrics", "/docs", "/openapi.json", "/v2"])
def test_head_is_get_without_a_body(server, path):
    whole, head = ask(server, path), ask(server, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    # Headers that may differ between two answers; the length differs because bodies contain changing counts.
    changing = ("date", "content-length", "x-request-id")
    assert {n: v for n, v in head.headers.items() if n not in changing} == {
        n: v for n, v in whole.headers.items() if n not in changing
    }
    assert "content-length" in head.headers
