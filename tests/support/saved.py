"""Requests that save, use and delete forward passes, with the API keys of tests/support/caches.py."""

from tests.support.caches import bearer
from tests.support.messages import ask, message, normal, post

HQ, HK, S, D = 4, 2, 24, 16


def forward(server, tensors, name="alice", **options):
    return post(server, "/attention", message(tensors, **options), **bearer(name))


def gradient(server, tensors, name="alice", **options):
    return post(server, "/attention/grad", message(tensors, **options), **bearer(name))


def saved_of(answer):
    assert answer.status == 200, answer
    return answer.metadata["saved"]


def delete(server, one, name="alice"):
    return ask(server, f"/saved/{one}", "DELETE", **bearer(name))


def qkv(seed=0, batch=2, length=S):
    shapes = {"q": (batch, HQ, length, D), "k": (batch, HK, length, D), "v": (batch, HK, length, D)}
    return {name: normal(*shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}
