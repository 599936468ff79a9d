"""Bearer keys and their rights."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import RIGHTS


class Keyring:
    """The keys of `Settings.api_keys`, each `KEY` (every right) or `KEY:right+right`. Without keys all may do all."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._keys = []
        for entry in entries:
            key, _, rights = entry.partition(":")
            self._keys.append((_digest(key), frozenset(rights.split("+") if rights else RIGHTS)))

    def admit(self, headers: Mapping[str, str], right: str) -> None:
        """Raises Refusal: 401 without a known key, 403 where the key lacks `right`."""
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        rights: frozenset[str] | None = None
        for digest, its_rights in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, given):
                rights = its_rights
        if scheme.lower() != "bearer" or rights is None:
            what = "the key is not known" if scheme.lower() == "bearer" else "a bearer key is needed"
            raise Refusal("unauthorized", what, headers={"WWW-Authenticate": "Bearer"})
        if right not in rights:
            raise Refusal("forbidden", f"the key does not have the right {right!r}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
