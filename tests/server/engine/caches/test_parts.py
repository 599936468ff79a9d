"""CPU attention over caches reads chunks without a copy, is right, and gives each sequence the bits it has alone."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_contract.caches import CHUNK, LayerShape, plan_cached
from flashpoint_contract.options import Options
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import Problem, attention, native, quantize
from flashpoint_kernels.cpu_backend.spans import Part
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_server.engine.caches.attending import CachedCall, CallTensors, attend
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheRef, CacheShape

ALICE = Terms("alice")
HK, D, DV = 2, 32, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class Caches:
    """Caches with random tokens. `dims`: (D, Dv); `keep`: as in POST /caches; `paged`: whether chunks are pages."""

    def __init__(
        self, lengths: list[int], dtype: str, keep: int | None = None, dims: tuple[int, int] = (D, DV),
        paged: bool = False,
    ) -> None:  # fmt: skip
        self.shape = CacheShape((HK,), dims[:1], dims[1:], dtype)
        self.store = CacheStore(Ledger(1 << 26), 100.0, paged=paged)
        made = self.store.create(ALICE, self.shape, len(lengths), None, [keep], None)
        self.serials = [record.serial for record in made]
        kind = getattr(torch, dtype) if dtype in ("float16", "bfloat16") else torch.float32
        self.tokens = [
            tuple(normal(HK, length, dim, seed=n + 100 * m).to(kind) for m, dim in enumerate(dims))
            for n, length in enumerate(lengths)
        ]
        for serial, (k, v) in zip(self.serials, self.tokens, strict=True):
            for start in range(0, k.shape[1], 700):  # 700, so that several writes fill a chunk
                tokens = slice(start, start + 700)
                self.store.write(ALICE, [serial], 0, None, [(k[:, tokens], v[:, tokens])])
        self.dtype = dtype

    def attend(
        self, which: list[int], tensors: dict[str, Tensor], cores: int = 1, backend: str = "cpu", **options: Any
    ) -> tuple[Tensor, Tensor, list[Problem | Part]]:
        infos = {name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        layer = LayerShape(HK, self.shape.head_dim[0], self.shape.value_dim[0], self.dtype)
        spec = plan_cached(infos, Options(return_lse=True, **options), layer, len(which))
        q = tensors["q"]
        o, lse = q.new_full((*q.shape[:-1], layer.value_dim), torch.nan), torch.full(spec.lse_shape, torch.nan)
        caches = CacheRef("alice", tuple(self.serials[n] for n in which), 0, None, "", None, -1)
        call = CachedCall(CallTensors.of(spec, tensors, {"o": o, "lse": lse}), caches)
        _, parts = attend([(call, call.write(self.store))], backend, cores)
        for part in parts:
            if isinstance(part, Part):
                part.compute()
            else:
                run_part(part, backend)
        return o, lse, list(parts)

    def expected(self, number: int, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """Return o (Hq, Sq, Dv) and lse (Hq, Sq) of one sequence, by the backend `reference`, in float64."""
        k, v = (t[None] for t in self.tokens[number])
        scales = {}
        if self.dtype in ("int8", "float8_e4m3fn"):
            (k, k_scale), (v, v_scale) = (quantize(t, getattr(torch, self.dtype)) for t in (k, v))
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        o, lse = attention(**tensors, k=k, v=v, **scales, **options, return_lse=True, backend="reference")
        return o[0], lse[0]


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]),
    lengths=st.lists(st.sampled_from([1, 15, 130, CHUNK, CHUNK + 1, 2300]), min_size=1, max_size=3),
    q_len=st.sampled_from([1, 2, 70, 150]), group=st.sampled_from([1, 3]), causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (40, 3), (1500, -1)]), alibi=st.booleans(), sinks=st.booleans(),
    cores=st.sampled_from([1, 2, 5]), scale=st.sampled_from([None, -0.3]), paged=st.booleans(),
    mask=st.sampled_from(["", "bool", "float", "float64", "row"]), dropout_p=st.sampled_from([0.0, 0.0, 0.3]),
    dims=st.sampled_from([(D, DV), (D, DV), (24, 40)]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_call_is_right_and_has_the_bits_of_each_sequence_alone(
    dtype: str, lengths: list[int], q_len: int, group: int, causal: bool, window: tuple[int, int], alibi: bool,
    sinks: bool, cores: int, scale: float | None, paged: bool, mask: str, dropout_p: float, dims: tuple[int, int],
) -> None:  # fmt: skip
    """Any call is right, and each sequence has the bits it has alone.

    Chunks are separate, or pages of one block (`paged`), as in a server with the backend `triton`.
    """
    caches, heads = Caches(lengths, dtype, paged=paged, dims=dims), HK * group
    kind = getattr(torch, dtype) if dtype in ("float16", "bfloat16") else torch.float32
    q = normal(len(lengths), heads, q_len, dims[0], seed=7).to(kind)
    masks = normal(len(lengths), 1 if mask == "float" else heads, q_len, 1 if mask == "row" else max(lengths) + 5)
    masks = masks > -1 if mask == "bool" else masks.double() if mask == "float64" else masks

    def masked(n: int, length: int | None = None) -> dict[str, Tensor]:
        return {"attn_mask": masks[n : n + 1, ..., :length]} if mask else {}

    extra = ({"alibi_slopes": normal(heads, seed=8).abs() / 16} if alibi else {}) | (
        {"sinks": normal(heads, seed=9)} if sinks else {}
    )
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": 3}
    every = list(range(len(lengths)))
    given_mask = {"attn_mask": masks} if mask else {}
    o, lse, parts = caches.attend(every, {"q": q, **extra, **given_mask}, cores, **options)
    assert all(isinstance(part, Part) for part in parts)
    for n in every[:1] if dropout_p else every:  # dropout depends on the index in the batch
        own_o, own_lse, _ = caches.attend([n], {"q": q[n : n + 1], **extra, **masked(n)}, 1, **options)
        assert torch.equal(own_o[0], o[n])
        assert torch.equal(own_lse[0], lse[n])
        right, right_lse = caches.expected(n, {"q": q[n : n + 1], **extra, **masked(n, lengths[n])}, **options)
        tolerance = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}.get(dtype, 5e-6)
        torch.testing.assert_close(o[n].float(), right.float(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[n], right_lse, rtol=1e-5, atol=1e-5)


def test_packed_queries_of_different_lengths() -> None:
    caches = Caches([1500, 40, 900], "float32")
    starts = [0, 3, 3, 80]
    q = normal(80, 4, D, seed=7)
    tensors = {"q": q, "cu_seqlens_q": torch.tensor(starts)}
    o, lse, _ = caches.attend([0, 1, 2], tensors, 2, layout="thd", causal=True)
    for n in (0, 2):
        queries = slice(starts[n], starts[n + 1])
        right, right_lse = caches.expected(n, {"q": q[queries].transpose(0, 1)[None]}, causal=True)
        torch.testing.assert_close(o[queries].transpose(0, 1), right, rtol=5e-6, atol=5e-6)
        torch.testing.assert_close(lse[:, queries], right_lse, rtol=1e-5, atol=1e-5)


def test_a_window_over_a_cache_that_has_dropped_its_first_chunks() -> None:
    caches = Caches([5000], "float32", keep=600)
    (cache,) = caches.store.find(ALICE, caches.serials)
    assert cache.tracks[0].first >= 3 * CHUNK
    q = normal(1, 4, 2, D, seed=7)
    o, _, parts = caches.attend([0], {"q": q}, window=(500, 0), causal=True)
    assert isinstance(parts[0], Part)
    right, _ = caches.expected(0, {"q": q}, window=(500, 0), causal=True)
    torch.testing.assert_close(o[0], right, rtol=5e-6, atol=5e-6)


def test_a_large_call_has_parts_of_about_equal_work_and_a_small_one_has_one() -> None:
    caches = Caches([6000, 6000], "float32")
    q = normal(2, HK, 1, D, seed=7)
    assert len(caches.attend([0, 1], {"q": q}, 4)[2]) > 1
    assert len(caches.attend([0], {"q": q[:1, :, :, :]}, 1)[2]) == 1
    *_, parts = caches.attend([0], {"q": normal(1, HK, 3000, D)}, 1, causal=True)
    assert len(parts) > 8
    assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])]
    assert parts[-1].last == parts[0].forward.units


@pytest.mark.parametrize("options", [{}, {"window": (30, 0), "causal": True}], ids=["plain", "window"])
def test_without_the_kernels_tokens_are_copied_into_pages(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the C kernels, the backend `tiled` computes, and the tokens are copied into pages for it."""
    monkeypatch.setattr(native, "library", lambda: None)
    caches = Caches([1100, 3], "float32")
    q = normal(2, 4, 2, D, seed=7)
    o, _, parts = caches.attend([0, 1], {"q": q}, backend="tiled", **options)
    assert isinstance(parts[0], Problem)
    for n in range(2):
        right, _ = caches.expected(n, {"q": q[n : n + 1]}, **options)
        torch.testing.assert_close(o[n], right, rtol=5e-6, atol=5e-6)
