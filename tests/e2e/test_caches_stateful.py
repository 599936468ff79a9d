"""Random sequences of HTTP calls on KV caches have the same effect as on a model of the caches in NumPy."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from flashpoint_kernels import attention
from tests.support.caches import HK, HQ, LAYERS, SHAPE, D, attended, bearer, created, kv, posted, started
from tests.support.messages import ask, message, normal, post
from tests.support.servers import wait_for

NAMES = ("alice", "bob")
names, layers, ends = st.sampled_from(NAMES), st.integers(0, LAYERS - 1), st.none() | st.integers(0, 1040)
new_tokens, backs = st.integers(1, 3) | st.just(1030), st.none() | st.integers(-1, 40)
OPTIONS = [{}, {"causal": True}, {"causal": True, "window": [7, 0]}, {"softcap": 2.0}]


@pytest.fixture(scope="module")
def shared_server(start_server, tmp_path_factory):
    return started(start_server, tmp_path_factory, 64 << 20)


class Model:
    """The expected state of a cache: its owner, k and v (2, n, Hk, D) of each layer, and writes to repeat."""

    def __init__(self, owner, tokens=None):
        self.owner = owner
        self.layers = tokens or [np.zeros((2, 0, HK, D), np.float32) for _ in range(LAYERS)]
        self.writes = []  # (idempotency key, function that repeats the write); the latest is last
        self.last = None  # idempotency key of the last write

    @property
    def longest(self):
        return max(layer.shape[1] for layer in self.layers)

    def write(self, layer, place, tokens, key, again):
        self.layers[layer] = np.concatenate((self.layers[layer][:, :place], tokens), 1)
        self.wrote(key, again)

    def wrote(self, key, again):
        self.last = key
        if key:
            self.writes.append((key, again))


class Calls(RuleBasedStateMachine):
    """Calls of clients with two API keys. Each call has a new connection, so any HTTP process may answer it."""

    server = None
    keys = itertools.count()

    def __init__(self):
        super().__init__()
        self.there, self.owners, self.lost, self.gone, self.seed = {}, {}, [], [], 0

    def teardown(self):
        for name in NAMES:
            ids = [one for one, model in self.there.items() if model.owner == name]
            if ids:
                assert posted(self.server, "/caches/delete", {"caches": ids}, name).status == 204

    # The expected errors of calls

    def some(self, data):
        return data.draw(st.sampled_from([*self.there, *self.lost, *self.gone] or ["c" + "A" * 60]))

    def problem(self, name, *ids):
        """Return (code, indices of the wrong caches) of the error that API key `name` must get for `ids`, or None.

        If some caches belong to another API key, the error names only these: the HTTP process refuses them first.
        """
        never = [n for n, one in enumerate(ids) if self.owners.get(one) != name]
        if never:
            return "cache_not_found", never
        ended = {n: "cache_lost" if one in self.lost else "cache_not_found"
                 for n, one in enumerate(ids) if one not in self.there}  # fmt: skip
        return (next(iter(ended.values())), list(ended)) if ended else None

    def refused(self, answer, problem, caches=None):
        """Check that an error answer has the code and the indices of `problem`, the result of `self.problem`.

        The request sent the first `caches` ids (None: all) in its field `caches`, and the rest in its field `free`.
        """
        code, named = problem
        assert answer.json["code"] == code, answer
        fields = [f"caches.{n}" if caches is None or n < caches else f"free.{n - caches}" for n in named]
        assert [error["loc"] for error in answer.json.get("errors", ())] == [[field] for field in fields]

    def key(self, wanted):
        return f"{id(self)}-{next(self.keys)}" if wanted else None

    def headers(self, key):
        return {"Idempotency_Key": key} if key else {}

    # Creation and deletion of caches

    @rule(name=names, count=st.integers(1, 2), twice=st.booleans())
    def create(self, name, count, twice):
        headers = self.headers(self.key(twice))
        answers = [posted(self.server, "/caches", {**SHAPE, "count": count}, name, **headers) for _ in range(1 + twice)]
        ids = [[cache["id"] for cache in answer.json["caches"]] for answer in answers]
        assert len(ids[0]) == count
        assert ids[-1] == ids[0]
        self.owners |= dict.fromkeys(ids[0], name)
        self.there |= {one: Model(name) for one in ids[0]}

    @rule(data=st.data(), name=names, end=ends, free=st.booleans(), twice=st.booleans())
    def fork(self, data, name, end, free, twice):
        ids = [self.some(data) for _ in range(data.draw(st.integers(1, 2)))]
        freed = [self.some(data)] if free else []
        request = {"caches": ids, "lengths": None if end is None else [end] * len(ids), "free": freed}
        headers = self.headers(self.key(twice))
        answers = [posted(self.server, "/caches/fork", request, name, **headers) for _ in range(1 + twice)]
        problem = self.problem(name, *ids, *freed)
        if problem is None and end is not None:
            far = [n for n, one in enumerate(ids) if end > self.there[one].longest]
            problem = ("cache_position", far) if far else None
        if problem is not None:
            self.refused(answers[0], problem, len(ids))
            return
        copies = [[cache["id"] for cache in answer.json["caches"]] for answer in answers]
        assert copies[-1] == copies[0]
        self.owners |= dict.fromkeys(copies[0], name)
        for one, copy in zip(ids, copies[0], strict=True):
            self.there[copy] = Model(name, [layer[:, :end].copy() for layer in self.there[one].layers])
        for one in freed:
            del self.there[one]
            self.gone.append(one)

    @rule(data=st.data(), name=names, several=st.booleans())
    def delete(self, data, name, several):
        ids = [self.some(data) for _ in range(1 + several)]
        if several:
            answer = posted(self.server, "/caches/delete", {"caches": ids}, name)
        else:
            answer = ask(self.server, f"/caches/{ids[0]}", "DELETE", **bearer(name))
        if problem := self.problem(name, *ids):
            self.refused(answer, problem)
            return
        assert (answer.status, answer.body) == (204, b"")
        for one in set(ids):
            del self.there[one]
            self.gone.append(one)

    @rule(name=names)
    def expire(self, name):
        (one,) = created(self.server, name, ttl_s=0.01)
        wait_for(lambda: self.look(one, name).status == 410, lambda: "it does not expire")
        self.owners[one] = name
        self.lost.append(one)

    # Writes and cuts of tokens

    @rule(
        data=st.data(), name=names, layer=layers, new=new_tokens | st.just(0), back=backs, keyed=st.booleans(),
        option=st.sampled_from(OPTIONS), two=st.booleans(),
    )  # fmt: skip
    def attend(self, data, name, layer, new, back, keyed, option, two):
        ids = [self.some(data) for _ in range(1 + two)]
        self.seed += 1
        q = normal(len(ids), HQ, new or 2, D, seed=self.seed)
        options, tensors, problem = {"caches": ids, "layer": layer, **option}, {"q": q}, self.problem(name, *ids)
        lengths = [0 if problem else self.there[one].layers[layer].shape[1] for one in ids]
        places = [length if back is None or not new else max(0, length - back) for length in lengths]
        if new:
            k, v = kv(new, self.seed, len(ids))
            tensors |= {"k": k, "v": v}
            if back is not None:
                options["at"] = places
            if len(set(ids)) < len(ids):
                assert attended(self.server, tensors, name, **options).status in (404, 422)
                return
        if problem is None and (far := [n for n, place in enumerate(places) if place > lengths[n]]):
            problem = "cache_position", far
        key = self.key(keyed and new)

        def send():
            return attended(self.server, tensors, name, self.headers(key), **options)

        answers = [send() for _ in range(1 + bool(key))]
        if problem is not None:
            for answer in answers:
                self.refused(answer, problem)
            return
        assert all(answer.status == 200 for answer in answers), answers
        models = [self.there[one] for one in ids]
        if new:
            added = np.stack([t.transpose(1, 2).numpy() for t in (k, v)])
            for n, (model, place) in enumerate(zip(models, places, strict=True)):
                model.write(layer, place, added[:, n], key, send if len(ids) == 1 else None)
        o = answers[0].tensors["o"]
        assert all(torch.equal(answer.tensors["o"], o) for answer in answers)
        assert json.loads(answers[-1].metadata["lengths"]) == [model.layers[layer].shape[1] for model in models]
        for n, model in enumerate(models):
            whole = [torch.from_numpy(t).transpose(0, 1)[None] for t in model.layers[layer]]
            expected = attention(q[n : n + 1], *whole, backend="tiled", **option)
            torch.testing.assert_close(o[n : n + 1], expected, rtol=1e-4, atol=1e-5)

    @rule(data=st.data(), name=names, layer=layers, new=new_tokens, back=backs, keyed=st.booleans())
    def append(self, data, name, layer, new, back, keyed):
        one = self.some(data)
        self.seed += 1
        (k, v), key = kv(new, self.seed), self.key(keyed)
        problem = self.problem(name, one)
        length = 0 if problem else self.there[one].layers[layer].shape[1]
        place = length if back is None else max(0, length - back)
        options = {"layer": layer} | ({} if back is None else {"at": place})

        def send():
            body = message({"k": k[0], "v": v[0]}, **options)
            return post(self.server, f"/caches/{one}/append", body, **bearer(name), **self.headers(key))

        answers = [send() for _ in range(1 + keyed)]
        if problem is None and place > length:
            problem = "cache_position", [0]
        if problem is not None:
            self.refused(answers[0], problem)
            return
        model = self.there[one]
        model.write(layer, place, np.stack([t[0].transpose(0, 1).numpy() for t in (k, v)]), key, send)
        assert [answer.json for answer in answers] == [{"length": model.layers[layer].shape[1]}] * len(answers)

    @precondition(lambda self: any(model.writes for model in self.there.values()))
    @rule(data=st.data())
    def copy_comes_late(self, data):
        """Repeat a write with its idempotency key: a cache's last write gets status 200, an earlier write 409.

        Neither repetition changes the cache.
        """
        model = data.draw(st.sampled_from([model for model in self.there.values() if model.writes]))
        key, send = data.draw(st.sampled_from(model.writes))
        if send is None:
            return
        answer = send()
        assert (
            (answer.status, answer.json["code"]) == (409, "cache_stale") if model.last != key else answer.status == 200
        )

    @rule(data=st.data(), name=names, end=st.integers(0, 1040), keyed=st.booleans())
    def truncate(self, data, name, end, keyed):
        one = self.some(data)
        problem, key = self.problem(name, one), self.key(keyed)

        def send():
            return posted(self.server, f"/caches/{one}/truncate", {"length": end}, name, **self.headers(key))

        answers = [send() for _ in range(1 + keyed)]
        if problem is None and end > self.there[one].longest:
            problem = "cache_position", [0]
        if problem is not None:
            self.refused(answers[0], problem)
            return
        model = self.there[one]
        model.layers = [layer[:, :end] for layer in model.layers]
        model.wrote(key, send)
        for answer in answers:
            assert answer.json["lengths"] == [layer.shape[1] for layer in model.layers]

    # Reads of caches

    def look(self, one, name):
        return ask(self.server, f"/caches/{one}", **bearer(name))

    @rule(data=st.data(), name=names, renew=st.booleans())
    def describe(self, data, name, renew):
        one = self.some(data)
        answer = posted(self.server, f"/caches/{one}/renew", {}, name) if renew else self.look(one, name)
        if problem := self.problem(name, one):
            self.refused(answer, problem)
            return
        assert answer.json["lengths"] == [layer.shape[1] for layer in self.there[one].layers]

    @rule(data=st.data(), name=names, layer=layers)
    def export(self, data, name, layer):
        one = self.some(data)
        answer = ask(self.server, f"/caches/{one}/tensors?layer={layer}", **bearer(name))
        if problem := self.problem(name, one):
            self.refused(answer, problem)
            return
        for tensor, expected in zip("kv", self.there[one].layers[layer], strict=True):
            np.testing.assert_array_equal(answer.tensors[tensor][0].transpose(0, 1).numpy(), expected)

    @rule(name=names)
    def list_them(self, name):
        listed = ask(self.server, "/caches", **bearer(name)).json["caches"]
        assert {cache["id"] for cache in listed} == {one for one, model in self.there.items() if model.owner == name}


@pytest.mark.slow
def test_every_call_does_what_the_model_does(shared_server):
    Calls.server = shared_server
    run_state_machine_as_test(Calls, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
    for name in NAMES:
        assert ask(shared_server, "/caches", **bearer(name)).json == {"caches": []}
