"""Admit or refuse requests, by limits on the total cost of all admitted requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from flashpoint_contract.spec import Spec
from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_server.access.limits import Quota
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import Counts
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal

# A request may wait at most this fraction of the time to its deadline: the engine's speed is an estimate, and the
# request's own work also takes time.
PATIENCE = 0.5
FREE = Price(0, 0.0)
WaitingSince = Callable[[], float | None]
FEW = 4  # with at most this many requests, waits are not predicted: the engine's speed is measured only under load


def _never() -> None:
    return None


class Permit:
    """One admitted request: the bytes of its tensors, and its price. `leave`, or the end of the context, ends it.

    `quota` has the limits of the request's key, if there are any. `waiting_since` returns the end of the request's
    body, in `time.monotonic` seconds: from then on, the client waits only for the service. It returns None before that,
    and once the answer has begun.
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
        self.leave()

    def leave(self) -> None:
        """Uncount the request and its price."""
        self._admission.leave(self)
        self.waiting_since = _never  # drop the function: it may form a reference cycle

    def charge(self, price: Price, deadline: float | None = None, pace: float = 0.0) -> None:
        """Count the request's price. Raises Refusal 429.

        `pace` is how many predicted seconds of work the engine finishes in one second; 0 means unknown.
        """
        if deadline is not None and pace:
            self._admission.check_wait(price.seconds, deadline - time.monotonic(), pace)
        self._admission.add(price, self.quota)
        self.price = price

    def grow(self, nbytes: int) -> None:
        """Count `nbytes` more. Raises Refusal 429."""
        self._admission.grow(self, nbytes)

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` more, and charge them to the API key. Raises Refusal 429."""
        self.grow(nbytes)
        if self.quota is not None:
            self.quota.take("bytes", nbytes)

    def settle(self, price: Price) -> None:
        """Replace the predicted price by the true price after the launch.

        Charge the key for the difference even if this exceeds its limits.
        """
        before, self.price = self.price, price
        self._admission.correct(before, price)
        if self.quota is not None:
            self.quota.owe("flops", price.flops - before.flops)
            self.quota.owe("seconds", price.seconds - before.seconds)

    def correct(self, price: Price) -> None:
        """Replace the charged price by a lower one, when the lengths of the sequences are known."""
        before, self.price = self.price, price
        self._admission.correct(before, price)
        if self.quota is not None:
            self.quota.give_back("flops", before.flops - price.flops)
            self.quota.give_back("seconds", before.seconds - price.seconds)


class Admission:
    """Counts admitted requests, their bytes, FLOPs and predicted seconds.

    A request counts from its admission, when its head has been read, until its answer has been sent. The limits apply
    to the totals of all HTTP processes. A process counts a request before it compares the totals with the limits. So
    two processes that admit at the same moment may both refuse, but do not exceed a limit together. A request that is
    alone is admitted whatever its size.
    """

    def __init__(self, settings: Settings, counts: Counts | None = None) -> None:
        self._requests_limit = settings.queue_limit
        self._bytes_limit = settings.queue_bytes
        self._flops_limit = settings.queue_flops
        self._seconds_limit = settings.queue_seconds
        counts = counts or Counts()
        self._column = counts.column
        self._requests, self._bytes = counts.requests, counts.bytes
        self._flops, self._seconds = counts.flops, counts.seconds
        self._inside: dict[Permit, None] = {}  # the requests of this process, in the order of arrival

    @property
    def requests(self) -> int:
        """The number of requests in this process. `bytes`, `flops` and `seconds` are also those of this process."""
        return len(self._inside)

    @property
    def bytes(self) -> int:
        return int(self._bytes[self._column])

    @property
    def flops(self) -> int:
        return int(self._flops[self._column])

    @property
    def seconds(self) -> float:
        """The predicted seconds of the requests."""
        return self._seconds[self._column]

    @property
    def oldest_seconds(self) -> float:
        """The longest time in seconds since the end of a request's body, for requests without an answer; 0 if none."""
        since = (permit.waiting_since() for permit in self._inside)
        oldest = min((began for began in since if began is not None), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def permit(self, nbytes: int, quota: Quota | None = None, waiting_since: WaitingSince = _never) -> Permit:
        """Admit a request with `nbytes` of tensors. Raises Refusal 429."""
        permit = Permit(self, nbytes, quota, waiting_since)
        self._inside[permit] = None
        self._requests[self._column] += 1
        self._bytes[self._column] += nbytes
        try:
            if (others := int(sum(self._requests)) - 1) >= self._requests_limit:
                raise Refusal("queue_full", f"the queue is full: it has {others} requests, its limit")
            self._check_bytes(others, nbytes)
            if quota is not None:  # last, so that a request refused for another reason costs the key nothing
                quota.enter(nbytes)
        except Refusal:
            self._exit(permit)
            raise
        return permit

    def _check_bytes(self, others: int, nbytes: int) -> None:
        """Raise Refusal 429 if the queue has too many bytes with the `nbytes` of a request that is already counted."""
        # Admit a request of any size if there is no other: its body is within the body limits.
        if others and (inside_bytes := int(sum(self._bytes))) > self._bytes_limit:
            inside_bytes -= nbytes
            raise Refusal(
                "queue_full",
                f"the queue is full: its requests hold {in_bytes(inside_bytes)}, and this one needs {in_bytes(nbytes)}",
            )

    def _exit(self, permit: Permit) -> None:
        del self._inside[permit]
        self._requests[self._column] -= 1
        self._bytes[self._column] -= permit.nbytes

    def grow(self, permit: Permit, nbytes: int) -> None:
        """Count `nbytes` more for an admitted request. Raises Refusal 429."""
        permit.nbytes += nbytes
        self._bytes[self._column] += nbytes
        self._check_bytes(int(sum(self._requests)) - 1, nbytes)

    def leave(self, permit: Permit) -> None:
        self._exit(permit)
        self.correct(permit.price, FREE)
        if not self._inside:
            self._flops[self._column] = 0.0  # remove rounding errors of the sums
            self._seconds[self._column] = 0.0
        if permit.quota is not None:
            permit.quota.leave()

    def check_wait(self, predicted: float, seconds: float, pace: float) -> None:
        """Raise Refusal 429 if a request of `predicted` seconds cannot reach its deadline, which is `seconds` away.

        Without this check, under overload each request would start just before its deadline, and all answers would be
        late. A longer admitted request counts as `predicted`, because the new request overtakes the rest of it.
        The counted requests and `pace` are those of this process alone: a process with a fraction of the queue also has
        this fraction of the engine's speed.
        """
        if self.seconds <= (patience := seconds * PATIENCE) * pace or patience <= 0 or self.requests <= FEW:
            return
        if (wait := sum(min(permit.price.seconds, predicted) for permit in self._inside) / pace) > patience:
            raise Refusal(
                "queue_full",
                f"the requests ahead take {wait:.2g} s, and the deadline of this one is in {seconds:.2g} s",
            )

    def add(self, price: Price, quota: Quota | None) -> None:
        """Count a request's price. Raises Refusal 429 if it exceeds a limit of the queue or of the API key."""
        before = self._flops[self._column], self._seconds[self._column]
        self.correct(FREE, price)
        try:
            self._check_price(price)
            if quota is not None:
                self._take(price, quota)
        except Refusal:
            self._flops[self._column] = before[0]
            self._seconds[self._column] = before[1]
            raise

    @staticmethod
    def _take(price: Price, quota: Quota) -> None:
        """Charge the price to the API key. If this raises Refusal 429, nothing is charged."""
        quota.take("flops", price.flops)
        try:
            quota.take("seconds", price.seconds)
        except Refusal:
            quota.give_back("flops", price.flops)
            raise

    def _check_price(self, price: Price) -> None:
        """Raise Refusal 429 if a price that is already counted exceeds a limit."""
        if sum(self._requests) <= 1:
            return
        if (flops := sum(self._flops)) > self._flops_limit:
            flops -= price.flops
            raise Refusal(
                "queue_full", f"the queue is full: its requests need {flops:.3g} FLOPs, and this one {price.flops:.3g}"
            )
        if (seconds := sum(self._seconds)) > self._seconds_limit:
            seconds -= price.seconds
            raise Refusal(
                "queue_full",
                f"the queue is full: its requests take {seconds:.3g} compute seconds, and this one {price.seconds:.3g}",
            )

    def correct(self, before: Price, after: Price) -> None:
        """Count the price `after` instead of `before`."""
        self._flops[self._column] += after.flops - before.flops
        self._seconds[self._column] += after.seconds - before.seconds


def check_size(spec: Spec, memory: int, sequence_limit: int, workspace: int = 0) -> None:
    """Raise Refusal 413 if a request could never run on a device with `memory` bytes, as far as its head shows.

    `workspace` is the memory that its backend needs beside the tensors.
    """
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences exceed the limit of {sequence_limit}")
    if (needed := spec.footprint + workspace) > memory:
        raise Refusal(
            "work_too_large", f"the request needs at least {in_bytes(needed)}, and the device has {in_bytes(memory)}"
        )
