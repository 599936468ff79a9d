"""Empty the caches of routes, plans and options, so that a test can observe how a call makes them."""

from flashpoint_contract import spec
from flashpoint_kernels import functional
from flashpoint_kernels.operators import plain, solving
from flashpoint_kernels.triton_backend.host import route, schedule

MODULES = (route, schedule, spec, plain, solving, functional)


def forget() -> None:
    """Empty every cache in which a call of attention looks up its route, plan or options."""
    for module in MODULES:
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear") and cached.__module__ == module.__name__:
                cached.cache_clear()
