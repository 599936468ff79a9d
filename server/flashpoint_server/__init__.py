"""The service: attention and its gradients over HTTP. `create_app` makes it; `flashpoint serve` runs it."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpoint_server.app import create_app
    from flashpoint_server.config.settings import Settings

__all__ = ["Settings", "create_app"]

_MODULES = {"create_app": "flashpoint_server.app", "Settings": "flashpoint_server.config.settings"}


# When it is imported, prometheus_client decides by these variables to count in files of a folder. A folder from the
# environment of another program may have the counts of processes that have ended. So only the supervisor names one, in
# METRICS, to its HTTP processes. Where a program has imported prometheus_client before, its choice stays.
METRICS = "_FLASHPOINT_METRICS"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
if "prometheus_client" not in sys.modules:
    for _name in (MULTIPROCESS, MULTIPROCESS.lower()):
        os.environ.pop(_name, None)
    if (_folder := os.environ.pop(METRICS, None)) is not None:
        os.environ[MULTIPROCESS] = _folder


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: an engine starts faster without the modules for HTTP."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
