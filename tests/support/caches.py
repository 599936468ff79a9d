"""KV caches over HTTP for tests: a server with API keys, and calls with these keys."""

import hashlib
import json

import flashpoint
from tests.support.messages import JSON, ask, message, normal, post
from tests.support.servers import wait_for

HQ, HK, D, DV, LAYERS = 4, 2, 16, 16, 2
SHAPE = {"layers": LAYERS, "kv_heads": HK, "head_dim": D}
SAVED_QUOTA = 100_000
KEYS = {name: f"key-of-{name}-with-some-length" for name in ("alice", "bob", "carol")}


def started(start_server, tmp_path_factory, cache_bytes=8 << 20, quota=1_000_000, **settings):
    """Start a server with two HTTP processes, API keys and little cache memory; only carol's key has the `quota`."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(file, KEYS, quota)
    server = start_server(workers=2, api_keys_file=file, cache_bytes=cache_bytes, **settings)
    server.keys_file = file
    wait_both(server)
    return server


def started_for_saved(start_server, tmp_path_factory):
    """Start a server as `started` does, with memory for only a few saved forward passes."""
    return started(start_server, tmp_path_factory, cache_bytes=1 << 20, quota=SAVED_QUOTA)


def wait_both(server):
    """Wait until both HTTP processes have an engine: a connection may reach either of them."""
    wait_for(lambda: all(ask(server, "/health/ready").status == 200 for _ in range(20)), lambda: "not ready")


def write_keys(file, names, quota=1_000_000):
    rows = []
    for name in names:
        digest = hashlib.sha256(KEYS[name].encode()).hexdigest()
        limit = f"cache_bytes = {quota}\n" if name == "carol" else ""
        rows.append(f'[{name}]\nsha256 = "{digest}"\nrights = ["attention", "info", "metrics", "verify"]\n{limit}')
    new = file.with_suffix(".new")
    new.write_text("\n".join(rows))
    new.replace(file)


def bearer(name):
    return {"Authorization": f"Bearer {KEYS[name]}"}


def client(server, name="alice", **how):
    return flashpoint.Client(server.url, api_key=KEYS[name], timeout=240, **how)


def posted(server, path, document, name="alice", **headers):
    return post(server, path, json.dumps(document).encode(), JSON, **bearer(name), **headers)


def created(server, name="alice", **options):
    answer = posted(server, "/caches", {**SHAPE, **options}, name)
    assert answer.status == 201, answer
    return [cache["id"] for cache in answer.json["caches"]]


def attended(server, tensors, name="alice", headers=(), **options):
    return post(server, "/attention", message(tensors, **options), **bearer(name), **dict(headers))


def kv(count, seed, batch=1):
    return normal(batch, HK, count, D, seed=seed), normal(batch, HK, count, DV, seed=seed + 1000)


def lengths(server, one, name="alice"):
    return ask(server, f"/caches/{one}", **bearer(name)).json["lengths"]


def appended(server, one, k, v, name="alice", **options):
    return post(server, f"/caches/{one}/append", message({"k": k[0], "v": v[0]}, **options), **bearer(name))
