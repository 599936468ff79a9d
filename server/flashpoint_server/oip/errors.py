"""A refusal in the form of the Open Inference Protocol."""

from __future__ import annotations

import json

from flashpoint import jsonwire
from flashpoint_server.refusal import Refusal


def written(refusal: Refusal, _: str) -> tuple[str, bytes]:
    """Return media type and body: `{"error": …}`."""
    text = json.dumps({"error": refusal.detail}, ensure_ascii=False)
    return jsonwire.MEDIA_TYPE, text.encode("utf-8", "replace")
