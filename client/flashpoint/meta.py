"""The metadata of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_DURATION = re.compile(r"\s*([\w-]+)[^,]*?;\s*dur=([0-9.]+)")


@dataclass(frozen=True)
class Meta:
    """How the server answered, as `with_meta=True` returns it. An attribute that the server did not send is None.

    Args:
        backend: Backend that computed the answer.
        seed: Seed of dropout, chosen by the caller or the server.
        batch_size: Number of requests that ran in the same launch.
        request_id: Name of the call in the server's log.
        timings: Milliseconds of the server's stages: `decode`, `queue`, `compute` and `encode`.
        retries: Attempts before the one that was answered.
        lengths: Number of tokens in each cache of the call after the call, for the layer of the call.
        saved: Id of the forward that the server saved.
        kernel: CPU kernel in C that computed it, such as `c-amx`; None if another kernel ran.
    """

    backend: str | None = None
    seed: int | None = None
    batch_size: int | None = None
    request_id: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    lengths: tuple[int, ...] | None = None
    saved: str | None = None
    kernel: str | None = None


def read_meta(headers: Mapping[str, str], metadata: Mapping[str, Any], retries: int) -> Meta:
    """Return the `Meta` of an answer, from its HTTP headers (a case-insensitive mapping) and its decoded metadata."""
    seed = metadata.get("dropout_seed")
    backend = headers.get("x-backend") or metadata.get("backend")
    kernel = headers.get("x-kernel") or metadata.get("kernel")
    size = headers.get("x-batch-size", "")
    saved = metadata.get("saved")
    return Meta(
        backend=backend if isinstance(backend, str) else None,
        seed=seed if type(seed) is int else None,
        batch_size=int(size) if size.isdecimal() else None,
        request_id=headers.get("x-request-id"),
        timings={name: float(ms) for name, ms in _DURATION.findall(headers.get("server-timing", ""))},
        retries=retries,
        lengths=tuple(lengths) if isinstance(lengths := metadata.get("lengths"), list) else None,
        saved=saved if isinstance(saved, str) else None,
        kernel=kernel if isinstance(kernel, str) else None,
    )
