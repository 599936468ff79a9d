"""Admit or refuse requests, by limits on the total cost of all admitted requests."""

from __future__ import annotations

import time

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
FEW = 4  # with at most this many requests, waits are not predicted: the engine's speed is measured only under load


class Admitted:
    """A request as admission counts it, from `Admission.enter` until `leave`: its bytes of tensors, and its price.

    `quota` has the limits of the request's key, if there are any.
    """

    inside = False  # whether the request has been admitted
    nbytes = 0
    quota: Quota | None = None
    price = FREE

    def waiting_since(self) -> float | None:
        """Return the end of the request's body, in `time.monotonic` seconds: from then on, only the service delays it.

        None before that, and once the answer has begun.
        """
        return None


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
        self._inside: dict[Admitted, None] = {}  # the requests of this process, in the order of arrival

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
        since = (request.waiting_since() for request in self._inside)
        oldest = min((began for began in since if began is not None), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def enter(self, request: Admitted, nbytes: int, quota: Quota | None = None) -> None:
        """Admit a request with `nbytes` of tensors. Raises Refusal 429."""
        self._inside[request] = None
        request.nbytes = nbytes
        self._requests[self._column] += 1
        self._bytes[self._column] += nbytes
        try:
            if (others := int(sum(self._requests)) - 1) >= self._requests_limit:
                raise Refusal("queue_full", f"the queue is full: it has {others} requests, its limit")
            if others:
                self._check_bytes(nbytes)
            if quota is not None:  # last, so that a request refused for another reason costs the key nothing
                quota.enter(nbytes)
        except Refusal:
            self._exit(request)
            raise
        request.inside, request.quota = True, quota

    def _check_bytes(self, nbytes: int) -> None:
        """Raise Refusal 429 if the queue has too many bytes with the `nbytes` of a request that is already counted.

        Do not call this for a request that is alone, which may have any size: its body is within the body limits.
        """
        if (inside_bytes := int(sum(self._bytes))) > self._bytes_limit:
            inside_bytes -= nbytes
            raise Refusal(
                "queue_full",
                f"the queue is full: its requests hold {in_bytes(inside_bytes)}, and this one needs {in_bytes(nbytes)}",
            )

    def _exit(self, request: Admitted) -> None:
        del self._inside[request]
        self._requests[self._column] -= 1
        self._bytes[self._column] -= request.nbytes

    def leave(self, request: Admitted) -> None:
        """Uncount a request and its price."""
        self._exit(request)
        if self._inside:
            self._replace(request.price, FREE)
        else:  # remove rounding errors of the sums
            self._flops[self._column] = self._seconds[self._column] = 0.0
        if request.quota is not None:
            request.quota.leave()

    def grow(self, request: Admitted, nbytes: int) -> None:
        """Count `nbytes` more. Raises Refusal 429."""
        request.nbytes += nbytes
        self._bytes[self._column] += nbytes
        if int(sum(self._requests)) > 1:
            self._check_bytes(nbytes)

    def hold(self, request: Admitted, nbytes: int) -> None:
        """Count `nbytes` more, and charge them to the API key. Raises Refusal 429."""
        self.grow(request, nbytes)
        if request.quota is not None:
            request.quota.take("bytes", nbytes)

    def charge(self, request: Admitted, price: Price, deadline: float | None = None, pace: float = 0.0) -> None:
        """Count a request's price. Raises Refusal 429 if it exceeds a limit of the queue or of the API key.

        `pace` is how many predicted seconds of work the engine finishes in one second; 0 means unknown.
        """
        if deadline is not None and pace:
            self._check_wait(price.seconds, deadline - time.monotonic(), pace)
        before = self._flops[self._column], self._seconds[self._column]
        self._flops[self._column] += price.flops
        self._seconds[self._column] += price.seconds
        try:
            if sum(self._requests) > 1:
                self._check_price(price)
            if request.quota is not None:
                self._take(price, request.quota)
        except Refusal:
            self._flops[self._column], self._seconds[self._column] = before
            raise
        request.price = price

    def settle(self, request: Admitted, price: Price) -> None:
        """Replace the predicted price by the true price after the launch.

        Charge the key for the difference even if this exceeds its limits.
        """
        before, request.price = request.price, price
        self._replace(before, price)
        if request.quota is not None:
            request.quota.owe("flops", price.flops - before.flops)
            request.quota.owe("seconds", price.seconds - before.seconds)

    def correct(self, request: Admitted, price: Price) -> None:
        """Replace the charged price by a lower one, when the lengths of the sequences are known."""
        before, request.price = request.price, price
        self._replace(before, price)
        if request.quota is not None:
            request.quota.give_back("flops", before.flops - price.flops)
            request.quota.give_back("seconds", before.seconds - price.seconds)

    def _check_wait(self, predicted: float, seconds: float, pace: float) -> None:
        """Raise Refusal 429 if a request of `predicted` seconds cannot reach its deadline, which is `seconds` away.

        Without this check, under overload each request would start just before its deadline, and all answers would be
        late. A longer admitted request counts as `predicted`, because the new request overtakes the rest of it.
        The counted requests and `pace` are those of this process alone: a process with a fraction of the queue also has
        this fraction of the engine's speed.
        """
        if self.seconds <= (patience := seconds * PATIENCE) * pace or patience <= 0 or self.requests <= FEW:
            return
        if (wait := sum(min(request.price.seconds, predicted) for request in self._inside) / pace) > patience:
            raise Refusal(
                "queue_full",
                f"the requests ahead take {wait:.2g} s, and the deadline of this one is in {seconds:.2g} s",
            )

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
        """Raise Refusal 429 if a price that is already counted, of a request that is not alone, exceeds a limit."""
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

    def _replace(self, before: Price, after: Price) -> None:
        """Count the price `after` instead of `before`."""
        self._flops[self._column] += after.flops - before.flops
        self._seconds[self._column] += after.seconds - before.seconds
