"""Who is let in: what a request costs, and how much of that may be inside at once."""

from __future__ import annotations

import time

from flashpoint_kernels.spec import Spec
from flashpoint_server.limits import Quota
from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import Settings

PATIENCE = 0.5  # part of its time that a request may wait for others: their speed is an estimate, its own work is left
FEW = 4  # requests that are let in beside each other whatever the speed was: an engine that idles shows none


class Permit:
    """One request inside, as a context: the bytes of its tensors, its FLOPs, and when it came (`time.monotonic`).

    `quota` is of the key that it came with, where that has limits.
    """

    def __init__(self, admission: Admission, nbytes: int, quota: Quota | None) -> None:
        self._admission = admission
        self.nbytes = nbytes
        self.quota = quota
        self.flops = 0
        self.since = time.monotonic()

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self)

    def price(self, flops: int, deadline: float | None = None, rate: float = 0.0) -> None:
        """Once it is known what the request asks. `rate` is in FLOP/s, 0 where it is not known. Raises Refusal 429."""
        if deadline is not None and rate:
            self._admission.check_wait(flops, deadline - time.monotonic(), rate)
        self._admission.add_flops(flops, self.quota)
        self.flops = flops


class Admission:
    """Counts requests, from their head to the last byte of their answer, and the bytes and FLOPs that they bring."""

    def __init__(self, settings: Settings) -> None:
        self._requests_limit = settings.queue_limit
        self._bytes_limit = settings.queue_bytes
        self._flops_limit = settings.queue_flops
        self._inside: dict[Permit, None] = {}  # in the order in which they came
        self.bytes = 0
        self.flops = 0

    @property
    def requests(self) -> int:
        return len(self._inside)

    @property
    def oldest_seconds(self) -> float:
        """Age of the request that has been inside for the longest; 0 where none is."""
        return max((time.monotonic() - permit.since for permit in self._inside), default=0.0)

    def permit(self, nbytes: int, quota: Quota | None = None) -> Permit:
        """Room for a request with so many bytes of tensors. Raises Refusal 429."""
        if self.requests >= self._requests_limit:
            raise Refusal("queue_full", f"{self.requests} requests are being served, as many as the server admits")
        # Alone, a request of any size that passed the limits on a body is let in.
        if self.requests and self.bytes + nbytes > self._bytes_limit:
            raise Refusal(
                "queue_full", f"the requests being served hold {self.bytes} bytes, and this one needs {nbytes}"
            )
        if quota is not None:  # last: what is refused for other reasons costs the key nothing
            quota.enter(nbytes)
        permit = Permit(self, nbytes, quota)
        self._inside[permit] = None
        self.bytes += nbytes
        return permit

    def leave(self, permit: Permit) -> None:
        del self._inside[permit]
        self.bytes -= permit.nbytes
        self.flops -= permit.flops
        if permit.quota is not None:
            permit.quota.leave()

    def check_wait(self, flops: int, seconds: float, rate: float) -> None:
        """Whether work of `flops` that has so many seconds left may join the queue. Raises Refusal 429.

        Else, with more asked than is served, each would come to its turn when its time is just over: all that is
        computed would be too late. Larger requests count for as much as this one, for it does not wait for their ends.
        """
        if self.flops <= (patience := seconds * PATIENCE) * rate or patience <= 0 or self.requests <= FEW:
            return
        if (wait := sum(min(permit.flops, flops) for permit in self._inside) / rate) > patience:
            raise Refusal(
                "queue_full", f"what is served before it takes {wait:.2g} s, and this one has {seconds:.2g} s"
            )

    def add_flops(self, flops: int, quota: Quota | None) -> None:
        if self.requests > 1 and self.flops + flops > self._flops_limit:
            raise Refusal(
                "queue_full", f"the requests being served need {self.flops:.3g} FLOPs, and this one {flops:.3g}"
            )
        if quota is not None:
            quota.take("flops", flops)
        self.flops += flops


def check_size(spec: Spec, memory: int, sequence_limit: int) -> None:
    """Refuse (413) what could never run on a device with `memory` bytes, as far as the head tells."""
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences are over the limit of {sequence_limit}")
    if spec.footprint > memory:
        raise Refusal("work_too_large", f"this needs at least {spec.footprint} bytes where the device has {memory}")
