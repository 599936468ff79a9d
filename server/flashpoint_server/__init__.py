"""The service: attention and its gradients over HTTP. `create_app` makes it, `flashpoint serve` runs it."""

from flashpoint_server.app import create_app
from flashpoint_server.settings import Settings

__all__ = ["Settings", "create_app"]
