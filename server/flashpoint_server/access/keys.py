"""Bearer keys: identify the caller and check permissions."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import NamedTuple

import structlog

from flashpoint_server.access.limits import Quota, Spent
from flashpoint_server.config.files import Files
from flashpoint_server.config.key_file import RIGHTS, KeyEntry, Permission, digest, entries
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.refusal import Refusal

log = structlog.stdlib.get_logger("flashpoint.keys")


class Caller(NamedTuple):
    """The owner of an API key. `name` is the name of the key and not secret; it is '' if the server has no keys."""

    name: str
    rights: frozenset[Permission]
    quota: Quota | None = None

    def use(self, right: Permission) -> None:
        """Count one call that needs `right`.

        Raises Refusal 403, whose text does not name the right, or 429 if the key exceeds its limits.
        """
        if right not in self.rights:
            raise Refusal("forbidden", "the API key lacks the permission for this call")
        if self.quota is not None:
            self.quota.take("requests", 1)


ANYONE = Caller("", frozenset(RIGHTS))


class Keyring:
    """The keys of `Settings.api_keys`, named key-1, key-2, …, and those of `Settings.api_keys_file`.

    Without either, every caller may do everything. Only the hash of a key is stored. Raises ValueError if two keys are
    the same.
    """

    def __init__(
        self,
        settings: Settings,
        shared: WorkerGroup = WorkerGroup(),  # noqa: B008  # a tuple
        files: Files | None = None,
    ) -> None:
        self._settings = settings
        self._files = files or Files(settings)
        self._shared = shared
        self._spent: dict[str, Spent] = {}
        self._callers: list[tuple[bytes, Caller]] = []
        self._load()

    @property
    def locked(self) -> bool:
        """Whether a caller needs a key."""
        return bool(self._callers)

    @property
    def names(self) -> list[str]:
        """The names of all keys; '' if no key is needed."""
        return list(dict.fromkeys(caller.name for _, caller in self._callers)) or [ANYONE.name]

    def reload(self) -> None:
        """Read the file again. If it is not valid, keep the present keys and log the error."""
        try:
            if not self._files.refresh_keys():
                return
            self._load()
        # An OSError may mean that no file descriptor is left for the counts of a new key.
        except (OSError, ValueError) as error:
            log.error("keys kept", error=str(error))
        else:
            log.info("keys loaded", keys=len(self._callers))

    def find(self, headers: Mapping[str, str]) -> Caller:
        """Return the owner of the request's key. Raises Refusal 401, with the same text for all reasons."""
        if not self._callers:
            return ANYONE
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip())
        owner: Caller | None = None
        for known, caller in self._callers:  # compare with all keys, so that the time reveals nothing
            if hmac.compare_digest(known, given):
                owner = caller
        if owner is None or scheme.lower() != "bearer":
            raise Refusal(
                "unauthorized",
                "the request has no valid API key: send Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner

    def _load(self) -> None:
        settings = self._settings
        found = entries(settings.api_keys, self._files.contents.keys, settings.api_keys_file)
        callers = [(self._caller(name, entry), entry.hashes) for name, entry in found.items()]
        self._callers = [(bytes.fromhex(one), caller) for caller, key_hashes in callers for one in key_hashes]

    def _caller(self, name: str, entry: KeyEntry) -> Caller:
        if not entry.limits:
            return Caller(name, entry.rights)
        if name not in self._spent:  # if only limits change, keep the key's usage
            self._spent[name] = Spent(name, self._shared)
        return Caller(name, entry.rights, Quota(entry, self._spent[name]))
