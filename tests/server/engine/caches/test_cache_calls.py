"""One call can create, list, fork or delete 2,000 caches."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.caches import bearer, client, created, posted
from tests.support.messages import ask, problem

MANY = 2000  # caches; the engine's answer for these takes several messages


@pytest.mark.slow
def test_thousands_of_caches_are_made_listed_forked_and_deleted_by_one_call_each(cache_server):
    ids = created(cache_server, layers=1, count=MANY)
    assert len(set(ids)) == MANY
    with client(cache_server) as alice:
        assert [cache.id for cache in alice.list_caches()] == ids
    copies = [
        cache["id"] for cache in posted(cache_server, "/caches/fork", {"caches": ids, "free": ids}).json["caches"]
    ]
    assert len(set(copies) - set(ids)) == MANY
    assert posted(cache_server, "/caches/delete", {"caches": copies}).status == 204
    gone = problem(posted(cache_server, "/caches/fork", {"caches": ids}), 404, "cache_not_found")
    assert gone["errors"][0]["loc"] == ["caches.0"]
    assert ask(cache_server, "/caches", **bearer("alice")).json == {"caches": []}
