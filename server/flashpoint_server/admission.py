"""Who is let in: what a request costs, and how much of that may be inside at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from flashpoint_kernels.spec import Spec
from flashpoint_server.limits import Quota
from flashpoint_server.price import Price
from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import Settings

PATIENCE = 0.5  # part of its time that a request may wait for others: their speed is an estimate, its own work is left
FREE = Price(0, 0.0)
WaitingSince = Callable[[], float | None]
FEW = 4  # requests that are let in beside each other whatever the speed was: an engine that idles shows none


class Permit:
    """One request inside, as a context: the bytes of its tensors, and its price.

    `quota` is of the key that it came with, where that has limits. `waiting_since` says since when the request has
    waited for the service alone, in `time.monotonic` seconds: None while its body comes, and once its answer leaves.
    """

    def __init__(self, admission: Admission, nbytes: int, quota: Quota | None, waiting_since: WaitingSince) -> None:
        self._admission = admission
        self.nbytes = nbytes
        self.quota = quota
        self.price = FREE
        self.waiting_since = waiting_since

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self)

    def charge(self, price: Price, deadline: float | None = None, pace: float = 0.0) -> None:
        """Count the price, once it is known what the request asks. Raises Refusal 429.

        `pace` is how many predicted seconds are answered a second, 0 where it is not known.
        """
        if deadline is not None and pace:
            self._admission.check_wait(price.seconds, deadline - time.monotonic(), pace)
        self._admission.add(price, self.quota)
        self.price = price

    def correct(self, price: Price) -> None:
        """Count a lower price than was charged, once the lengths of the sequences are known."""
        before, self.price = self.price, price
        self._admission.correct(before, price)
        if self.quota is not None:
            self.quota.give_back("flops", before.flops - price.flops)
            self.quota.give_back("seconds", before.seconds - price.seconds)


class Admission:
    """Counts requests, from their head to the last byte of their answer, and the bytes and FLOPs that they bring."""

    def __init__(self, settings: Settings) -> None:
        self._requests_limit = settings.queue_limit
        self._bytes_limit = settings.queue_bytes
        self._flops_limit = settings.queue_flops
        self._seconds_limit = settings.queue_seconds
        self._inside: dict[Permit, None] = {}  # in the order in which they came
        self.bytes = 0
        self.flops = 0
        self.seconds = 0.0  # predicted

    @property
    def requests(self) -> int:
        return len(self._inside)

    @property
    def oldest_seconds(self) -> float:
        """For how long the request has waited for the service that has waited for the longest; 0 where none waits."""
        since = (permit.waiting_since() for permit in self._inside)
        oldest = min((began for began in since if began is not None), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def permit(self, nbytes: int, quota: Quota | None = None, waiting_since: WaitingSince = lambda: None) -> Permit:
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
        permit = Permit(self, nbytes, quota, waiting_since)
        self._inside[permit] = None
        self.bytes += nbytes
        return permit

    def leave(self, permit: Permit) -> None:
        del self._inside[permit]
        self.bytes -= permit.nbytes
        self.correct(permit.price, FREE)
        if permit.quota is not None:
            permit.quota.leave()

    def check_wait(self, predicted: float, seconds: float, pace: float) -> None:
        """Whether work of so many predicted seconds may join the queue with `seconds` left. Raises Refusal 429.

        Otherwise, with more asked than is served, each request would get its turn just after its deadline, and all
        computing would be too late. Larger requests count for as much as this one, because it passes the rest of them.
        """
        if self.seconds <= (patience := seconds * PATIENCE) * pace or patience <= 0 or self.requests <= FEW:
            return
        if (wait := sum(min(permit.price.seconds, predicted) for permit in self._inside) / pace) > patience:
            raise Refusal(
                "queue_full",
                f"the requests before this one take {wait:.2g} s, and it has {seconds:.2g} s until its deadline",
            )

    def add(self, price: Price, quota: Quota | None) -> None:
        """Count a request's price. Raises Refusal 429 where the queue, or its key, has no room for it."""
        if self.requests > 1 and self.flops + price.flops > self._flops_limit:
            raise Refusal(
                "queue_full", f"the requests being served need {self.flops:.3g} FLOPs, and this one {price.flops:.3g}"
            )
        if self.requests > 1 and self.seconds + price.seconds > self._seconds_limit:
            raise Refusal(
                "queue_full",
                f"the requests being served take {self.seconds:.3g} s of a core, and this one {price.seconds:.3g} s",
            )
        if quota is not None:
            quota.take("flops", price.flops)
            quota.take("seconds", price.seconds)
        self.correct(FREE, price)

    def correct(self, before: Price, after: Price) -> None:
        """Count one price in place of another."""
        self.flops += after.flops - before.flops
        self.seconds += after.seconds - before.seconds


def check_size(spec: Spec, memory: int, sequence_limit: int) -> None:
    """Refuse (413) what could never run on a device with `memory` bytes, as far as the head tells."""
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences are over the limit of {sequence_limit}")
    if spec.footprint > memory:
        raise Refusal("work_too_large", f"this needs at least {spec.footprint} bytes where the device has {memory}")
