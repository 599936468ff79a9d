"""The service: attention and its gradients over HTTP. `create_app` makes it; `flashpoint serve` runs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import flashpoint_server.processes.counting  # noqa: F401  # before any module imports prometheus_client

if TYPE_CHECKING:
    from flashpoint_server.app import create_app
    from flashpoint_server.config.settings import Settings

__all__ = ["Settings", "create_app"]

_MODULES = {"create_app": "flashpoint_server.app", "Settings": "flashpoint_server.config.settings"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: an engine starts faster without the modules for HTTP."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
