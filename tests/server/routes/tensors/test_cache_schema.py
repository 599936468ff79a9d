"""A request for caches of absurd sizes is refused before memory is allocated."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.caches import SHAPE, bearer, created, posted
from tests.support.messages import ask, problem
from tests.support.servers import wait_for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"count": 4096, "max_length": (1 << 31) - 1}, 413, None),
        ({"count": 4097}, 422, "count"),
        ({"count": 4096, "layers": 512}, 422, "count"),
        ({"layers": 512, "kv_heads": 1 << 16, "head_dim": 1 << 16, "max_length": 1}, 413, None),
        ({"layers": 1 << 40}, 422, "layers"),
        ({"max_length": 1 << 40}, 422, "max_length"),
        ({"kv_heads": 1 << 40}, 422, "kv_heads"),
        ({"keep": [1] * 513, "layers": 512}, 422, "keep"),
        ({"keep": [1] * 511, "layers": 512}, 422, "keep"),
        ({"head_dim": list(range(1, 513)), "layers": 512}, 422, "layers"),
        ({"ttl_s": 1e300}, 422, "ttl_s"),
        ({"ttl_s": 0}, 422, "ttl_s"),
    ],
    ids=str,
)
def test_absurd_sizes_are_refused_before_memory_is_taken(cache_server, changes, status, field):
    answer = posted(cache_server, "/caches", {**SHAPE, **changes})
    document = problem(answer, status, "work_too_large" if status == 413 else "invalid_request")
    if field is not None:
        assert document["errors"][0]["loc"][0].partition(".")[0] == field, document
    wait_for(
        lambda: read_held(cache_server) == (0, 0), lambda: read_held(cache_server)
    )  # the server may still be deleting caches of other tests


@pytest.mark.slow
def test_a_fork_of_too_many_layers_is_refused(cache_server):
    (one,) = created(cache_server, layers=512)
    answer = posted(cache_server, "/caches/fork", {"caches": [one] * 300})
    assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["caches"]
    posted(cache_server, "/caches/delete", {"caches": [one]})


def read_held(server):
    usage = ask(server, "/info", **bearer("alice")).json["caches"]
    return usage["caches"], usage["bytes"]
