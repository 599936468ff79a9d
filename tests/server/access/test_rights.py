"""Each route needs its right, costs a request of the key's limit, and is counted by route, status, reason and key."""

import hashlib
import re
from collections import Counter

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_server.config.key_file import RIGHTS
from tests.support.messages import JSON, SAFETENSORS, ask, message, normal, post, problem, small

# The right of the routes whose paths begin so (docs/security.md); the longest beginning counts. Others need none.
NEEDED = {
    "/attention": "attention", "/caches": "attention", "/saved": "attention",
    "/verify": "verify", "/benchmark": "benchmark", "/info": "info", "/metrics": "metrics",
    "/v2": "info", "/v2/health": None, "/v2/models/stats": "metrics",
    "/v2/systemsharedmemory": "admin", "/v2/cudasharedmemory": "admin",
}  # fmt: skip
OF_A_MODEL = {"infer": "attention", "stats": "metrics", "ready": None}  # the last part of a path below /v2/models
KEYS = [*(f"only-{right}" for right in RIGHTS), "poor"]  # `poor` has all rights, and one request in a day
LIMITS = {
    "poor": "requests_per_second = 1e-5", "few": "cache_count = 2", "lengths": "flops_per_second = 1e5",
    "cached": "flops_per_second = 1e5", "weights": "bytes_per_second = 1e5",
}  # fmt: skip
HIDDEN = (
    "/v2/models/{name}/versions/{version}", "/v2/models/{name}/versions/{version}/config",
    "/v2/models/{name}/versions/{version}/stats", "/v2/models/{name}/versions/{version}/ready",
    "/v2/cudasharedmemory/status",
)  # fmt: skip


def needed(path):
    if path.startswith("/v2/models/") and (last := path.rpartition("/")[2]) in OF_A_MODEL:
        return OF_A_MODEL[last]
    return NEEDED.get(max((start for start in NEEDED if (path + "/").startswith(start + "/")), key=len, default=""))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, start_server):
    """Yield a server with a key for each right."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    lines = []
    for name in dict.fromkeys((*KEYS, *LIMITS, "all")):
        rights = [name.removeprefix("only-")] if name.startswith("only-") else list(RIGHTS)
        digest = hashlib.sha256(f"key of {name}".encode()).hexdigest()
        lines += [f"[{name}]", f'sha256 = "{digest}"', f"rights = {rights}"]
        lines += [LIMITS[name]] if name in LIMITS else []
    file.write_text("\n".join(lines))
    return start_server(api_keys_file=file, shared_memory_bytes=1 << 20)


def bearer(name):
    return {} if name is None else {"authorization": f"Bearer key of {name}"}


def routes(server):
    """Return (method, path) of each route."""
    paths = ask(server, "/openapi.json").json["paths"]
    listed = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*listed, *(("GET", path) for path in HIDDEN)]


def call(server, method, path, key):
    path = path.replace("{name}", "attention").replace("{version}", "1")
    path = re.sub(r"\{\w+\}", "unknown", path)
    if method == "POST":
        return post(server, path, b"{}", JSON, **bearer(key))
    return ask(server, path, method, **bearer(key))


def counted(server):
    """Return the samples of /metrics that count requests, by the values of their labels in alphabetical order."""
    text = ask(server, "/metrics", **bearer("all")).body.decode()
    samples = re.findall(r"^flashpoint_(?:key_)?requests_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return Counter({tuple(re.findall(r'"(.*?)"', labels)): int(float(value)) for labels, value in samples})


def test_each_route_needs_its_right_and_is_counted(guarded):
    every = routes(guarded)
    assert {needed(path) for _, path in every} == {*RIGHTS, None}
    assert call(guarded, "GET", "/info", "poor").status == 200  # the only request of its day
    before, by_key, by_route, called = counted(guarded), Counter(), Counter(), Counter()
    for method, path in every:
        right, route = needed(path), re.sub(r"\{\w+\}", "*", path)
        for key in (None, *KEYS):
            answer = call(guarded, method, path, key)
            expected = None
            if right is not None:
                expected = {None: 401, "poor": 429, f"only-{right}": None}.get(key, 403)
            refused = answer.status if answer.status in (401, 403, 429) else None
            assert refused == expected, f"{method} {path} with the key {key} is {answer.status}; its right is {right}"
            called[answer.status] += 1
            by_route[route, answer.status] += 1
            if expected in (403, 429):
                by_key[key, {403: "forbidden", 429: "key_limit"}[expected]] += 1
    new = counted(guarded) - before
    assert {labels: new[labels] for labels in by_key} == by_key
    of_status, of_route = Counter(), Counter()
    for (_, route, status), count in ((labels, count) for labels, count in new.items() if len(labels) == 3):
        of_status[int(status)] += count
        of_route[route, int(status)] += count
    of_status[200] -= 1  # the request for `before`
    assert of_status == called
    named = {route for route, _ in of_route} - {"other"}
    assert named >= {"/attention", "/caches/*/append", "/saved/*", "/verify", "/v2/models/attention/infer"}
    assert {key: count for key, count in of_route.items() if key[0] in named} == {
        key: count for key, count in by_route.items() if key[0] in named
    }


def test_a_key_has_at_most_its_number_of_caches_and_saved_forwards(guarded):
    """Creations, forks and saved forwards count together; what is deleted makes room again."""

    def send(path, body, media=JSON):
        return post(guarded, path, body, media, **bearer("few"))

    create = lambda: send("/caches", b'{"layers": 1, "kv_heads": 1, "head_dim": 3}')  # noqa: E731
    (cache,) = create().json["caches"]
    named = f'{{"caches": ["{cache["id"]}"]}}'.encode()
    saved = send("/attention", small(save=True), SAFETENSORS)
    assert saved.status == 200, saved
    for refused in (create(), send("/caches/fork", named), send("/attention", small(save=True), SAFETENSORS)):
        problem(refused, 429, "key_limit")
    assert send("/caches/delete", named).status == 204
    assert create().status == 201
    problem(create(), 429, "key_limit")


def test_sequences_of_unlike_lengths_cost_what_they_need(guarded):
    """A call whose lengths were all its keys' would cost 160 times what this key may have in a second."""
    tensors = {"q": normal(2, 1, 64, 16), "k": normal(2, 1, 2048, 16), "v": normal(2, 1, 2048, 16)}
    short = message(tensors | {"kv_lengths": torch.tensor([2, 1])})
    for _ in range(5):
        assert post(guarded, "/attention", short, **bearer("lengths")).status == 200
    assert post(guarded, "/attention", message(tensors), **bearer("lengths")).status == 200
    problem(post(guarded, "/attention", short, **bearer("lengths")), 429, "key_limit")


@pytest.mark.parametrize(("key", "options"), [("cached", {}), ("weights", {"return_key_weights": True})])
def test_a_call_over_a_cache_costs_what_it_read_and_answered(guarded, key, options):
    """A call over 4096 tokens needs 17 times the FLOPs that one key may have in a second; its weights are 20 times the
    bytes of the other.
    """
    made = post(guarded, "/caches", b'{"kv_heads": 1, "head_dim": 1}', JSON, **bearer(key)).json["caches"]
    (path,) = [f"/caches/{cache['id']}/append" for cache in made]
    tokens = message({name: normal(1, 1, 4096, 1) for name in "kv"})
    assert post(guarded, path, tokens, **bearer(key)).status == 200
    call = message({"q": normal(1, 128, 1, 1)}, caches=[made[0]["id"]], **options)
    assert post(guarded, "/attention", call, **bearer(key)).status == 200
    problem(post(guarded, "/attention", call, **bearer(key)), 429, "key_limit")
