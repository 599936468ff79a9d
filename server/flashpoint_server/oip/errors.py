"""A refusal, written as the client of its address reads it."""

from __future__ import annotations

import json

from flashpoint import jsonwire
from flashpoint_server.exchange import Exchange
from flashpoint_server.refusal import MEDIA_TYPE, Refusal


def written(refusal: Refusal, exchange: Exchange) -> tuple[str, bytes]:
    """Media type and body: `{"error": …}` under /v2, else a problem document."""
    if not (exchange.path + "/").startswith("/v2/"):
        return MEDIA_TYPE, refusal.body(exchange.request_id)
    text = json.dumps({"error": refusal.detail}, ensure_ascii=False)
    return jsonwire.MEDIA_TYPE, text.encode("utf-8", "replace")
