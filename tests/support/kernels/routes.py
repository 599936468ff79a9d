"""Empty the caches of routes, plans and options, so that a test can observe how a call makes them."""

from flashpoint_contract import spec
from flashpoint_kernels import functional
from flashpoint_kernels.operators import solving
from flashpoint_kernels.triton_backend.host import route, schedule


def forget() -> None:
    """Empty every cache in which a call of attention looks up its route, plan or options."""
    for cached in (
        route._route, route._config, schedule._of_steps, schedule._forward_lists, schedule._gradient_lists,
        schedule._stored_lists, spec._plan, spec._planned, spec._features, spec._level, solving._options_of,
        solving.forward_options, solving.backward_options, functional._remembered,
    ):  # fmt: skip
        getattr(cached, "cache_clear")()  # noqa: B009
