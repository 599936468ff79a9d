"""Problems for the Triton kernels, named by their options, with seeded normal inputs that the interpreter can run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, verify
from tests.conftest import DEVICE, FUSED, INTERPRETING
from tests.support.covering import covering

# The factors of a case and their levels. A covering array has every pair of levels in some case.
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "float16", "bfloat16"),
    "layout": ("bhsd", "bshd", "thd"),
    "band": ("full", "causal", "top_left", "window", "offsets", "offset"),
    "softcap": (0.0, 3.0),
    "alibi": (False, True),
    "mask": (None, "bool", "full", "keys", "heads"),
    "blocks": (None, "own", "shared"),
    "sinks": (False, True),
    "dropout": (False, True),
    "lengths": (False, True),
    "dlse": (False, True),
    "group": (1, 2),
    "dims": ((16, 16), (24, 40), (64, 64)),
}
PLAIN: dict[str, Any] = {name: levels[0] for name, levels in FACTORS.items()}
BLOCK_SIZE = (16, 48)  # block edges are inside the interpreter's tiles, and tile edges inside blocks
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "causal_alignment": "top_left"},
    "window": {"window": (20, 7)},
    "offsets": {"causal": True},
    "offset": {"window": (20, 7)},
}


def possible(case: dict[str, Any]) -> bool:
    """Return whether a case is valid: the ragged layout takes no masks, block masks or lengths."""
    return case["layout"] != "thd" or (case["mask"] is None and case["blocks"] is None and not case["lengths"])


def pairs() -> list[dict[str, Any]]:
    """Return a covering array of FACTORS: each valid pair of levels of two factors occurs in some case."""
    return covering(FACTORS, possible=possible)


def tensors_of(
    case: dict[str, Any], q_len: int, kv_len: int, *, seed: int = 0, batch: int = 2
) -> dict[str, torch.Tensor]:
    """Return the tensors of a gradient request for `case`, with 2 key/value heads; thd has three sequences."""
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case["dtype"])
    (dim, value_dim), kv_heads = case["dims"], 2
    heads = kv_heads * case["group"]

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    def tensor(length: int, heads: int, dim: int) -> torch.Tensor:
        if case["layout"] == "thd":
            return normal(length, heads, dim, dtype=dtype)
        return normal(
            *((batch, heads, length) if case["layout"] == "bhsd" else (batch, length, heads)), dim, dtype=dtype
        )

    tensors = {
        "q": tensor(q_len, heads, dim),
        "k": tensor(kv_len, kv_heads, dim),
        "v": tensor(kv_len, kv_heads, value_dim),
        "do": tensor(q_len, heads, value_dim),
    }
    if case["layout"] == "thd":
        tensors["cu_seqlens_q"] = torch.tensor([0, q_len // 3, q_len // 3, q_len])
        tensors["cu_seqlens_k"] = torch.tensor([0, kv_len // 2, kv_len // 2 + 1, kv_len])
    if case["dlse"]:
        tensors["dlse"] = normal(*((heads, q_len) if case["layout"] == "thd" else (batch, heads, q_len)))
    if case["mask"] == "bool":
        tensors["attn_mask"] = (torch.rand((batch, 1, q_len, kv_len), generator=g) < 0.6).to(DEVICE)
    elif case["mask"]:
        shape = {"full": (batch, heads, q_len, kv_len), "keys": (batch, 1, 1, kv_len), "heads": (heads, q_len, 1)}
        tensors["attn_mask"] = normal(*shape[case["mask"]], dtype=dtype)
    if case["alibi"]:
        tensors["alibi_slopes"] = (torch.rand(heads, generator=g) / 2).to(
            DEVICE
        )  # ALiBi's slopes for 8 heads start at 1/2
    if case["sinks"]:
        tensors["sinks"] = normal(heads)
    if case["lengths"]:
        tensors["q_lengths"] = torch.tensor([q_len, q_len // 2])
        tensors["kv_lengths"] = torch.tensor([kv_len // 3, kv_len])
    if case["band"] == "offsets":  # the first sequence has queries without keys, and the last one may see all its keys
        sequences = len(tensors["cu_seqlens_q"]) - 1 if case["layout"] == "thd" else batch
        tensors["offset"] = torch.linspace(-2, kv_len, sequences).long()
    if case["band"] == "offset":
        tensors["offset"] = torch.tensor(-3)
    if case["blocks"]:
        blocks = (-(-n // size) for n, size in zip((q_len, kv_len), BLOCK_SIZE, strict=True))
        shape = (batch, heads, *blocks) if case["blocks"] == "own" else (1, 1, *blocks)
        tensors["block_mask"] = (torch.rand(shape, generator=g) < 0.6).to(DEVICE)
    return tensors


def options_of(case: dict[str, Any], **more: Any) -> Options:
    grads = ["dq", "dk", "dv"]
    grads += ["dattn_mask"] if case["mask"] not in (None, "bool") else []
    grads += ["dsinks"] if case["sinks"] else []
    dropout = {"dropout_p": 0.3, "dropout_seed": 5} if case["dropout"] else {}
    return Options(
        layout=case["layout"], softcap=case["softcap"], grads=tuple(grads), backend="triton",
        block_size=BLOCK_SIZE if case["blocks"] else (128, 128), **BANDS[case["band"]], **dropout, **more,
    )  # fmt: skip


def name_of(case: dict[str, Any]) -> str:
    """Return a name for `case`: the levels in which it differs from the case PLAIN."""
    return "-".join(f"{n}={v}" for n, v in case.items() if v != PLAIN[n]).replace(" ", "") or "plain"


def check(case: dict[str, Any], q_len: int, kv_len: int, *, batch: int = 2, **more: Any) -> None:
    """Assert by `verify` that the answers for `case` are right: `batch` sequences when interpreted, two on a GPU."""
    report = verify(tensors_of(case, q_len, kv_len, batch=batch if INTERPRETING else 2), options_of(case, **more))
    assert report.backend == "triton"
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


BACKENDS = [FUSED, "tiled", "reference", "triton"]
# For tests that run with each backend. Triton's interpreter is slow, so `make test` runs them without Triton.
EACH = [*BACKENDS[:3], pytest.param("triton", marks=pytest.mark.slow)]
CASES = pairs()


def each_pair() -> Iterator[Any]:
    """Yield each backend but reference with each case. A third of Triton's cases is marked `slow`, the rest `full`."""
    for backend, (n, case) in product(BACKENDS, enumerate(CASES)):
        if backend != "reference":
            marks = [] if backend != "triton" else pytest.mark.full if n % 3 else pytest.mark.slow
            yield pytest.param(backend, case, marks=marks, id=f"{backend}-{name_of(case)}")
