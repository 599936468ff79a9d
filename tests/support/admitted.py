"""A request as admission sees it, with the calls of `Admission` as methods."""

from functools import partial

from flashpoint_server.access.admission import Admitted


class Entered(Admitted):
    """A request that `admission` has admitted, until `leave` or the end of the context. Raises Refusal."""

    def __init__(self, admission, nbytes, quota=None, waiting_since=lambda: None):
        self.waiting_since = waiting_since
        admission.enter(self, nbytes, quota)
        for name in ("charge", "settle", "correct", "grow", "hold", "leave"):
            setattr(self, name, partial(getattr(admission, name), self))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.leave()
