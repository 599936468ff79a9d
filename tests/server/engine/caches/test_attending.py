"""Calls over forks of a cache read their shared keys once, and have the same output bits in a batch and alone."""

import itertools
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from flashpoint_contract.caches import CHUNK, LayerShape, plan_cached
from flashpoint_contract.options import Options
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import attention
from flashpoint_kernels.cpu_backend.spans import Part, shares
from flashpoint_kernels.native.prefix import SharedPrefix
from flashpoint_server.engine.caches.attending import CachedCall, CallTensors, attend
from flashpoint_server.engine.caches.cache import StoredCache, Terms
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheRef, CacheShape

ALICE = Terms("alice")
TYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
SEEDS = itertools.count()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = np.random.default_rng(next(SEEDS))
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)


class Forks:
    """A store of caches of one shape, and helpers that write, fork and compute."""

    def __init__(self, dtype: str, heads: int, dim: int, value_dim: int, keep: int | None = None) -> None:
        self.layer = LayerShape(heads, dim, value_dim, dtype)
        self.shape = CacheShape((heads,), (dim,), (value_dim,), dtype)
        self.store = CacheStore(Ledger(1 << 30), 1000.0)
        self.keep = keep
        self.kind = getattr(torch, dtype) if dtype in ("float16", "bfloat16") else torch.float32

    def create(self, length: int) -> int:
        (made,) = self.store.create(ALICE, self.shape, 1, None, [self.keep], None)
        self.write(made.serial, length)
        return made.serial

    def write(self, serial: int, count: int) -> None:
        heads, dim, value_dim, _ = self.layer
        k, v = (normal(heads, count, width, dtype=self.kind) for width in (dim, value_dim))
        self.store.write(ALICE, [serial], 0, None, [(k, v)])

    def fork(self, serial: int, count: int, length: int | None = None) -> list[int]:
        lengths = None if length is None else [length] * count
        return [made.serial for made in self.store.fork(ALICE, [serial] * count, lengths, [])]

    def call(self, serials: list[int], q: Tensor, sinks: Tensor | None = None, **options: Any) -> CachedCall:
        tensors = {"q": q} if sinks is None else {"q": q, "sinks": sinks}
        infos = {name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        spec = plan_cached(infos, Options(return_lse=True, **options), self.layer, len(serials))
        o = q.new_full((*q.shape[:-1], self.layer.value_dim), torch.nan)
        lse = torch.full(spec.lse_shape, torch.nan)
        caches = CacheRef("alice", tuple(serials), 0, None, "", None, -1)
        return CachedCall(CallTensors.of(spec, tensors, {"o": o, "lse": lse}), caches)

    def answers(self, calls: list[CachedCall], cores: int = 1) -> tuple[list[dict[str, Tensor]], list[Part]]:
        """Compute calls in one batch; return ({"o": …, "lse": …} of each call, the parts of the batch)."""
        _, parts = attend([(call, call.write(self.store)) for call in calls], "cpu", cores)
        cached = [part for part in parts if isinstance(part, Part)]
        for part in cached:
            part.compute()
        return [dict(call.of.outputs) for call in calls], cached


def prefixes(parts: list[Part]) -> list[SharedPrefix]:
    return [row for row in parts[0].forward.rows if isinstance(row, SharedPrefix)]


class Histories(RuleBasedStateMachine):
    """After random writes, forks, truncations and deletions, a call has the same output bits in a batch and alone."""

    shared: ClassVar[Counter[bool]] = Counter()  # the number of batches with (True) and without shared keys

    @initialize(
        dtype=st.sampled_from(TYPES), heads=st.integers(1, 3), dims=st.sampled_from([(16, 16), (24, 40)]),
        keep=st.sampled_from([None, None, None, 1500]), length=st.sampled_from([CHUNK, 2 * CHUNK, 2500]),
    )  # fmt: skip
    def begin(self, dtype: str, heads: int, dims: tuple[int, int], keep: int | None, length: int) -> None:
        self.forks = Forks(dtype, heads, *dims, keep)
        root = self.forks.create(length)
        self.there = [root, *self.forks.fork(root, 2)]

    @rule(data=st.data(), count=st.integers(1, 3), cut=st.booleans())
    def fork(self, data: Any, count: int, cut: bool) -> None:
        serial = data.draw(st.sampled_from(self.there))
        ends = st.integers(self.least(serial), self.track(serial).length)
        self.there += self.forks.fork(serial, count, data.draw(ends) if cut else None)

    @rule(data=st.data(), count=st.sampled_from([1, 3, 700, CHUNK]))
    def write(self, data: Any, count: int) -> None:
        self.forks.write(data.draw(st.sampled_from(self.there)), count)

    @rule(data=st.data(), back=st.integers(0, 1200))
    def truncate(self, data: Any, back: int) -> None:
        serial = data.draw(st.sampled_from(self.there))
        self.forks.store.truncate(ALICE, serial, max(self.least(serial), self.track(serial).length - back))

    @precondition(lambda self: len(self.there) > 1)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        serial = data.draw(st.sampled_from(self.there))
        self.there.remove(serial)
        self.forks.store.delete(ALICE, [serial])

    @precondition(lambda self: len(self.there) > 1)
    @rule(
        data=st.data(), q_len=st.sampled_from([1, 1, 5, 70]), group=st.sampled_from([1, 4]), cores=st.integers(1, 3),
        causal=st.booleans(), window=st.sampled_from([(-1, -1), (-1, -1), (1500, 0), (10, 0)]), sinks=st.booleans(),
        softcap=st.sampled_from([0.0, 3.0]), apart=st.booleans(), layout=st.sampled_from(["bhsd", "bshd"]),
    )  # fmt: skip
    def attend(
        self, data: Any, q_len: int, group: int, cores: int, causal: bool, window: tuple[int, int], sinks: bool,
        softcap: float, apart: bool, layout: str,
    ) -> None:  # fmt: skip
        some = data.draw(st.lists(st.sampled_from(self.there), min_size=2, max_size=6))
        heads = self.forks.layer.kv_heads * group
        shape = (len(some), heads, q_len) if layout == "bhsd" else (len(some), q_len, heads)
        q = normal(*shape, self.forks.layer.head_dim, dtype=self.forks.kind)
        options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "layout": layout}
        if any(self.track(serial).first for serial in some):
            options |= {"causal": True, "window": (200, 0)}  # so that no query sees a dropped token
        options["sinks"] = normal(heads) if sinks else None
        twins = [self.forks.fork(serial, 1)[0] for serial in some]  # they remember nothing of earlier calls
        alone = [
            self.forks.answers([self.forks.call([twin], q[n : n + 1], **options)])[0][0] for n, twin in enumerate(twins)
        ]
        self.forks.store.delete(ALICE, twins)
        if apart:  # separate requests that share a batch
            batched, parts = self.forks.answers(
                [self.forks.call([serial], q[n : n + 1].clone(), **options) for n, serial in enumerate(some)], cores
            )
        else:
            (one,), parts = self.forks.answers([self.forks.call(some, q, **options)], cores)
            batched = [{name: t[n : n + 1] for name, t in one.items()} for n in range(len(some))]
        for mine, theirs in zip(batched, alone, strict=True):
            assert not torch.isnan(theirs["o"]).any()
            assert torch.equal(mine["o"], theirs["o"])
            assert torch.equal(mine["lse"], theirs["lse"])
        self.shared[bool(prefixes(parts))] += 1

    def least(self, serial: int) -> int:
        """Return the length to which a cache may be cut: 70 queries see 200 tokens more, and none that was dropped."""
        first = self.track(serial).first
        return first and first + 270

    def track(self, serial: int) -> Any:
        cache: StoredCache
        (cache,) = self.forks.store.find(ALICE, [serial])
        return cache.tracks[0]


@pytest.mark.parametrize("examples", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_calls_over_forks_have_the_bits_of_each_call_alone_in_any_history(examples: int) -> None:
    Histories.shared.clear()
    chosen = settings(max_examples=examples, stateful_step_count=12, deadline=None)
    run_state_machine_as_test(Histories, settings=chosen)
    assert Histories.shared[True] > 10  # shared keys were tested often
    assert Histories.shared[False] > 10


def test_a_call_after_tokens_were_dropped_reads_those_that_are_left() -> None:
    """The write that drops the first chunk needs no new one: the last has room."""
    forks = Forks("float32", 2, 16, 16, keep=100)
    root, q = forks.create(CHUNK + 120), normal(1, 4, 1, 16)
    (cache,) = forks.store.find(ALICE, [root])
    for first in (0, CHUNK):
        assert cache.tracks[0].first == first
        k, v = (
            torch.cat([piece[n] for piece in cache.tracks[0].pieces(CHUNK, cache.tracks[0].length)], 2) for n in (1, 2)
        )
        (answer,), _ = forks.answers([forks.call([root], q, window=(50, 0), causal=True)])
        right = attention(q, k, v, window=(50, 0), causal=True, backend="reference")
        torch.testing.assert_close(answer["o"], right, rtol=5e-6, atol=5e-6)
        forks.write(root, 1)


def test_forks_of_forks_read_each_chunk_once() -> None:
    forks = Forks("float32", 2, 16, 16)
    root = forks.create(2 * CHUNK)
    left, right = forks.fork(root, 2)
    forks.write(left, CHUNK)
    forks.write(right, CHUNK + 3)
    leaves = [root, *forks.fork(left, 2), *forks.fork(right, 2, 3 * CHUNK)]
    for serial in leaves:
        forks.write(serial, 5)
    q = normal(5, 4, 1, 16)
    (answer,), parts = forks.answers([forks.call(leaves, q, causal=True)], cores=2)
    (prefix,) = prefixes(parts)
    assert sorted((run.start, run.stop, run.last - run.first) for run in prefix.runs) == [
        (0, 2 * CHUNK, 5), (2 * CHUNK, 3 * CHUNK, 2), (2 * CHUNK, 3 * CHUNK, 2)
    ]  # fmt: skip
    assert prefix.keys == 4 * CHUNK + 5 * 5
    caches = forks.store.find(ALICE, leaves)
    reads = forks.store.reads(caches, 0)
    assert reads is not None
    assert abs(sum(reads) - prefix.keys) <= len(leaves) * 4  # `reads` rounds up for each cache
    k, v = (
        [torch.cat([piece[n] for piece in cache.tracks[0].pieces(0, cache.tracks[0].length)], 2) for cache in caches]
        for n in (1, 2)
    )
    for n in range(5):
        right_o = attention(q[n : n + 1], k[n], v[n], causal=True, backend="reference")
        torch.testing.assert_close(answer["o"][n : n + 1], right_o, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("heads", "cores", "count", "groups"), [(1, 2, 8, [4, 4]), (1, 4, 3, [3]), (4, 2, 8, [8]), (1, 1, 500, [250, 250])]
)
def test_a_prefix_is_divided_where_cores_would_have_no_work_or_it_has_too_many_rows(
    heads: int, cores: int, count: int, groups: list[int]
) -> None:
    forks = Forks("float32", heads, 16, 16)
    leaves = forks.fork(forks.create(CHUNK), count)
    _, parts = forks.answers([forks.call(leaves, normal(count, heads, 1, 16))], cores)
    assert sorted(len(prefix.rows) for prefix in prefixes(parts)) == groups


@given(extra=st.sampled_from(["alibi_slopes", "attn_mask", "dropout_p"]))
@settings(max_examples=3, deadline=None)
def test_options_that_depend_on_positions_are_read_apart(extra: str) -> None:
    info = {"q": TensorInfo("float32", (2, 2, 1, 16))}
    shapes = {"alibi_slopes": (2,), "attn_mask": (1, 2048)}
    if extra in shapes:
        info[extra] = TensorInfo("float32", shapes[extra])
    options = Options(dropout_p=0.5, dropout_seed=1) if extra == "dropout_p" else Options()
    assert not shares(plan_cached(info, options, LayerShape(2, 16, 16, "float32"), 2))
    assert shares(plan_cached({"q": info["q"]}, Options(), LayerShape(2, 16, 16, "float32"), 2))
