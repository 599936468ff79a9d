"""The event loop of an HTTP process."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop


class Loop(uvloop.Loop):
    """uvloop's loop, whose servers give a TLS handshake `handshake_timeout` seconds. uvicorn has no such setting."""

    def __init__(self, handshake_timeout: float) -> None:
        super().__init__()
        self._handshake_timeout = handshake_timeout

    async def create_server(self, *args: Any, **how: Any) -> asyncio.AbstractServer:  # type: ignore[override]
        if how.get("ssl") is not None:
            how["ssl_handshake_timeout"] = self._handshake_timeout
        return await super().create_server(*args, **how)
