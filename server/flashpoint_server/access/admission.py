"""Admission: the cost of a request, and the limits on the cost of all requests inside."""

from __future__ import annotations

import time
from collections.abc import Callable

from flashpoint_contract.spec import Spec
from flashpoint_server.access.limits import Quota
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal

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

    def grow(self, nbytes: int) -> None:
        """Count so many bytes more. Raises Refusal 429."""
        self._admission.grow(self, nbytes)

    def settle(self, price: Price) -> None:
        """Count the price that a computed request has turned out to have; its key pays it, whatever its limits."""
        before, self.price = self.price, price
        self._admission.correct(before, price)
        if self.quota is not None:
            self.quota.owe("flops", price.flops - before.flops)
            self.quota.owe("seconds", price.seconds - before.seconds)

    def correct(self, price: Price) -> None:
        """Count a lower price than was charged, once the lengths of the sequences are known."""
        before, self.price = self.price, price
        self._admission.correct(before, price)
        if self.quota is not None:
            self.quota.give_back("flops", before.flops - price.flops)
            self.quota.give_back("seconds", before.seconds - price.seconds)


class Admission:
    """Counts requests, from their head to the last byte of their answer, and the bytes and FLOPs that they bring.

    The limits hold over all HTTP processes. A request is counted before the sums are compared with the limits: two
    processes that admit at the same moment may both refuse, but never exceed a limit together.
    """

    def __init__(self, settings: Settings, counts: Counts | None = None) -> None:
        self._requests_limit = settings.queue_limit
        self._bytes_limit = settings.queue_bytes
        self._flops_limit = settings.queue_flops
        self._seconds_limit = settings.queue_seconds
        counts = counts or Counts()
        self._requests, self._bytes = counts.requests, counts.bytes
        self._flops, self._seconds = counts.flops, counts.seconds
        self._inside: dict[Permit, None] = {}  # of this process, in the order in which they came

    @property
    def requests(self) -> int:
        """Requests inside this process, as are the amounts below."""
        return len(self._inside)

    @property
    def bytes(self) -> int:
        return int(self._bytes.own)

    @property
    def flops(self) -> int:
        return int(self._flops.own)

    @property
    def seconds(self) -> float:
        """Predicted."""
        return self._seconds.own

    @property
    def oldest_seconds(self) -> float:
        """For how long the request has waited for the service that has waited for the longest; 0 where none waits."""
        since = (permit.waiting_since() for permit in self._inside)
        oldest = min((began for began in since if began is not None), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def permit(self, nbytes: int, quota: Quota | None = None, waiting_since: WaitingSince = lambda: None) -> Permit:
        """Room for a request with so many bytes of tensors. Raises Refusal 429."""
        permit = Permit(self, nbytes, quota, waiting_since)
        self._enter(permit)
        try:
            self._check(nbytes)
            if quota is not None:  # last: what is refused for other reasons costs the key nothing
                quota.enter(nbytes)
        except Refusal:
            self._exit(permit)
            raise
        return permit

    def _check(self, nbytes: int) -> None:
        """Raises Refusal 429 where a request that is counted is one too many."""
        if (others := int(self._requests.total) - 1) >= self._requests_limit:
            raise Refusal("queue_full", f"{others} requests are being served, as many as the server admits")
        self._check_bytes(others, nbytes)

    def _check_bytes(self, others: int, nbytes: int) -> None:
        # Alone, a request of any size that passed the limits on a body is let in.
        if others and (held := int(self._bytes.total)) > self._bytes_limit:
            held -= nbytes
            raise Refusal("queue_full", f"the requests being served hold {held} bytes, and this one needs {nbytes}")

    def _enter(self, permit: Permit) -> None:
        self._inside[permit] = None
        self._requests.add(1)
        self._bytes.add(permit.nbytes)

    def _exit(self, permit: Permit) -> None:
        del self._inside[permit]
        self._requests.add(-1)
        self._bytes.add(-permit.nbytes)

    def grow(self, permit: Permit, nbytes: int) -> None:
        """Count so many bytes more of a request that is inside. Raises Refusal 429."""
        permit.nbytes += nbytes
        self._bytes.add(nbytes)
        self._check_bytes(int(self._requests.total) - 1, nbytes)

    def leave(self, permit: Permit) -> None:
        self._exit(permit)
        self.correct(permit.price, FREE)
        if not self._inside:
            self._flops.set(0.0)  # what sums of floats have left over
            self._seconds.set(0.0)
        if permit.quota is not None:
            permit.quota.leave()

    def check_wait(self, predicted: float, seconds: float, pace: float) -> None:
        """Whether work of so many predicted seconds may join the queue with `seconds` left. Raises Refusal 429.

        Otherwise, with more asked than is served, each request would get its turn just after its deadline, and all
        computing would be too late. Larger requests count for as much as this one, because it passes the rest of them.
        Queue and pace are this process's own: processes share the engine's pace as they share its queue.
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
        before = self._flops.own, self._seconds.own
        self.correct(FREE, price)
        try:
            self._check_price(price)
            if quota is not None:
                self._take(price, quota)
        except Refusal:
            self._flops.set(before[0])
            self._seconds.set(before[1])
            raise

    @staticmethod
    def _take(price: Price, quota: Quota) -> None:
        """Charge a key. Raises Refusal 429, and then takes nothing."""
        quota.take("flops", price.flops)
        try:
            quota.take("seconds", price.seconds)
        except Refusal:
            quota.give_back("flops", price.flops)
            raise

    def _check_price(self, price: Price) -> None:
        """Raises Refusal 429 where a price that is counted is too much."""
        if self._requests.total <= 1:
            return
        if (flops := self._flops.total) > self._flops_limit:
            flops -= price.flops
            raise Refusal(
                "queue_full", f"the requests being served need {flops:.3g} FLOPs, and this one {price.flops:.3g}"
            )
        if (seconds := self._seconds.total) > self._seconds_limit:
            seconds -= price.seconds
            raise Refusal(
                "queue_full",
                f"the requests being served take {seconds:.3g} s of a core, and this one {price.seconds:.3g} s",
            )

    def correct(self, before: Price, after: Price) -> None:
        """Count one price in place of another."""
        self._flops.add(after.flops - before.flops)
        self._seconds.add(after.seconds - before.seconds)


def check_size(spec: Spec, memory: int, sequence_limit: int) -> None:
    """Refuse (413) what could never run on a device with `memory` bytes, as far as the head tells."""
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences are over the limit of {sequence_limit}")
    if spec.footprint > memory:
        raise Refusal("work_too_large", f"this needs at least {spec.footprint} bytes where the device has {memory}")
