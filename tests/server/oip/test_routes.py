"""The routes of /v2 other than infer: health, metadata, the index of models, and errors for unknown paths."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.oip.message import LENGTH, PACK, call, infer, request, wanted
from tests.support.oip.problem import problem

MODELS = {"attention": ("o", "lse"), "attention_grad": ("dq", "dk", "dv", "dattn_mask", "dsinks")}


SMALL = problem()


def test_health_and_readiness(url):
    for path in ("/v2/health/live", "/v2/health/ready", *(f"/v2/models/{m}/ready" for m in MODELS)):
        reply = call(url, "GET", path)
        assert reply.status == 200, path
        assert reply.headers["content-type"] == "application/json"
    assert call(url, "GET", "/v2/health/live").head["live"] is True
    assert call(url, "GET", "/v2/health/ready").head["ready"] is True


def test_server_metadata(url):
    about = call(url, "GET", "/v2").head
    assert about["name"]
    assert about["version"]
    assert {"binary_tensor_data", "parameters", "statistics", "model_configuration"} <= set(about["extensions"])


def test_the_index_lists_both_models(url):
    assert {model["name"] for model in call(url, "POST", "/v2/repository/index", b"").head} >= set(MODELS)


@pytest.mark.parametrize("coding", PACK)
def test_metadata_and_errors_are_never_compressed(url, coding):
    assert call(url, "GET", "/v2/models/attention", accept_encoding=coding).head["name"] == "attention"
    assert infer(url, "attention", {"q": SMALL["q"]}, headers={"accept-encoding": coding}).error


def test_a_version_may_be_named(url):
    head, data = request(SMALL)
    reply = call(url, "POST", "/v2/models/attention/versions/1/infer", head + data, **{LENGTH: len(head)})
    assert reply.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/nothing/ready", 404),
        ("GET", "/v2/models/attention/versions/2", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/attention/versions/2/infer", 404),
        ("POST", "/v2/cudasharedmemory/region/r/register", 404),
        ("GET", "/v2/models/attention/infer", 405),
        ("DELETE", "/v2/models/attention", 405),
        ("POST", "/v2/health/live", 405),
    ],
)
def test_what_is_not_there_is_an_error_like_any_other(url, method, path, status):
    reply = call(url, method, path, b"" if method == "POST" else None)
    assert reply.status == status
    assert reply.error


MIB = 1 << 20


def test_shared_memory_is_off_by_default(server):
    for method, path in (("GET", "/region/a/status"), ("POST", "/region/a/register")):
        body = b"{}" if method == "POST" else None
        reply = call(server.url, method, "/v2/systemsharedmemory" + path, body)
        assert reply.status == 404
        assert "off" in reply.error
    place = {"shared_memory_region": "a", "shared_memory_byte_size": MIB}
    reply = infer(server.url, "attention", SMALL, outputs=[wanted("o", **place)])
    assert reply.status == 422
    assert "off" in reply.error
    assert "system_shared_memory" not in call(server.url, "GET", "/v2").head["extensions"]


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_what_is_off_has_no_regions_and_unregisters_nothing(server, kind):
    """Without shared memory, a server lists no regions, and answers 200 to Triton's clients that unregister regions."""
    path = f"/v2/{kind}sharedmemory"
    assert call(server.url, "GET", f"{path}/status").head == []
    for of in ("", "/region/any"):
        reply = call(server.url, "POST", f"{path}{of}/unregister", b"")
        assert (reply.status, reply.head) == (200, {})
