"""Who is let in: what a request costs, and how much of that may be inside at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from flashpoint_kernels.spec import ITEMSIZE, Spec, TensorInfo
from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import Settings


class Admission:
    """Counts requests, from their head to the last byte of their answer, and the bytes of their tensors."""

    def __init__(self, settings: Settings) -> None:
        self._requests_limit = settings.queue_limit
        self._bytes_limit = settings.queue_bytes
        self.requests = 0
        self.bytes = 0

    @contextmanager
    def permit(self, cost: int) -> Iterator[None]:
        """Room for a request with `cost` bytes of tensors. Raises Refusal 429."""
        if self.requests >= self._requests_limit:
            raise Refusal("queue_full", f"{self.requests} requests are being served, as many as the server admits")
        # Alone, a request of any size that passed the limits on a body is let in.
        if self.requests and self.bytes + cost > self._bytes_limit:
            raise Refusal("queue_full", f"the requests being served hold {self.bytes} bytes, and this one needs {cost}")
        self.requests += 1
        self.bytes += cost
        try:
            yield
        finally:
            self.requests -= 1
            self.bytes -= cost


def check_size(spec: Spec, backend: str, memory: int, sequence_limit: int) -> None:
    """Refuse (413) what could never run on a device with `memory` bytes, as far as the head tells."""
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences are over the limit of {sequence_limit}")
    if (needed := footprint(spec, backend)) > memory:
        raise Refusal("work_too_large", f"this needs at least {needed} bytes where the device has {memory}")


def footprint(spec: Spec, backend: str) -> int:
    """The least bytes that the work needs: its inputs and answers, and what the backend must hold beside them.

    A dimension of 0 counts as 1, so that an empty tensor cannot hide what the others would cost.
    """
    tensors = [*spec.tensors.values(), *spec.outputs.values()]
    if backend == "reference":  # one sequence's scores and probabilities
        tensors += [TensorInfo("float64", (spec.q_heads, spec.q_len, spec.kv_len))] * 2 * (not spec.ragged)
    return sum(math.prod(max(n, 1) for n in t.shape) * ITEMSIZE[t.dtype] for t in tensors)
