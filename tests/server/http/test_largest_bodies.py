"""No body within the limits keeps an event loop busy: what takes long runs in processes that can be ended."""

import itertools
import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.largest import filled, largest_documents, largest_heads, largest_inferences, names
from tests.support.messages import JSON, post

# Limits of the processor time of a whole request in the HTTP process, with ten times the room that it needs. A body of
# 30 MiB arrives in many steps, each of less than a millisecond.
SECONDS, SECONDS_30_MIB = 0.1, 0.8
LARGE = 30 << 20


@pytest.fixture(scope="module")
def measured(start_server):
    """Return a function that sends a body and returns the answer and the seconds of the event loop's thread."""
    server = start_server()
    one = post(server, "/caches", b"{}", JSON).json["caches"][0]["id"]

    def seconds():
        with open(f"/proc/{server.pid}/task/{server.pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9

    def send(path, media, body):
        before = seconds()
        answer = post(server, path.replace("{id}", one), body if isinstance(body, bytes) else body.encode(), media)
        return answer, seconds() - before

    return send


def check(measured, cases, limit):
    late, count = [], 0
    for name, path, media, body in cases:
        answer, seconds = measured(path, media, body)
        assert answer.status in (400, 404, 410, 413, 422), (name, answer)
        assert len(answer.body) < 1 << 20, name
        count += 1
        if seconds > limit:
            late.append((name, seconds))
    assert not late
    assert count


def test_the_largest_body_of_each_route_and_field_is_short_work(measured):
    """Each field has one kind of value here, and `…every_kind…` has all of them."""
    cases = itertools.chain(
        itertools.islice(largest_documents(1 << 17), 0, None, 3), itertools.islice(largest_heads(1 << 17), 0, None, 3),
        itertools.islice(largest_inferences(1 << 17), 0, None, 3),
    )  # fmt: skip
    check(measured, cases, SECONDS)


@pytest.mark.slow
def test_the_largest_body_of_every_kind_is_short_work(measured):
    check(measured, itertools.chain(largest_documents(1 << 20), largest_heads(), largest_inferences(1 << 20)), SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    {
        "names": ("/attention", lambda: f"{{{names(LARGE)}}}"),
        "names of a verification": ("/verify", lambda: f"{{{names(LARGE)}}}"),
        "numbers": ("/attention", lambda: f'{{"q":{filled("1", LARGE)},"k":[[1]],"v":[[1]]}}'),
        "an option": ("/attention", lambda: f'{{"q":[[1]],"grads":{filled("1", LARGE)}}}'),
        "parameters": (
            "/v2/models/attention/infer", lambda: f'{{"inputs":[],"parameters":{{{names(LARGE)}}}}}',
        ),
        "names of caches": ("/caches/fork", lambda: f"{{{names(8 << 20)[:-9]}}}"),
    }.values(),
)  # fmt: skip
def test_a_body_of_30_mib_is_read_in_short_steps(measured, path, body):
    check(measured, [(path, path, JSON, body())], SECONDS_30_MIB)


@pytest.mark.slow
def test_thousands_of_caches_are_made_forked_and_deleted_in_short_steps(measured):
    made, seconds = measured("/caches", JSON, json.dumps({"layers": 32, "count": 4096}))
    ids = [cache["id"] for cache in made.json["caches"]]
    forked, more = measured("/caches/fork", JSON, json.dumps({"caches": ids, "free": ids}))
    ids = [cache["id"] for cache in forked.json["caches"]]
    deleted, last = measured("/caches/delete", JSON, json.dumps({"caches": ids}))
    assert (len(ids), deleted.status) == (4096, 204)
    assert max(seconds, more, last) < 20 * SECONDS
