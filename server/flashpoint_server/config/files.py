"""The files of keys and certificates: one process reads and watches them, and others get the last good content.

The supervisor is this process; with one worker, it is the server itself. A file that is damaged or absent later changes
nothing: the last good content stays, also for processes that start then.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flashpoint_server.config import key_file, tls
from flashpoint_server.config.content import again, content, is_regular
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.watch import Watch

_DIGEST = hashlib.sha256().digest_size
_TRIES, _PAUSE = 200, 0.005  # reads, and seconds between two, of a content that another process is writing


class Contents(NamedTuple):
    """The last good content of the files; None where none is set."""

    keys: bytes | None = None
    certificate: tls.Certificate | None = None


class Files:
    """Reads the files of `settings`. Raises ValueError if one is not valid, here and later."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.contents = Contents(self._keys(content), self._certificate(content))

    def _keys(self, look: Callable[..., bytes]) -> bytes | None:
        path = self._settings.api_keys_file
        if path is None:
            return None
        text = look(path)
        key_file.entries(self._settings.api_keys, text, path)
        return text

    def _certificate(self, look: Callable[..., bytes]) -> tls.Certificate | None:
        settings = self._settings
        if settings.tls_cert is None:
            return None
        return tls.read(settings.tls_cert, settings.tls_key, settings.tls_client_ca, look)

    def refresh_keys(self) -> bool:
        """Read the keys again. Return whether to load them. Raises ValueError, and keeps the last content."""
        self.contents = self.contents._replace(keys=self._keys(again))
        return self.contents.keys is not None

    def refresh_certificate(self) -> bool:
        """Read the certificate and its key again, like `refresh_keys`. The authorities stay those of the start."""
        if (certificate := self._certificate(again)) is not None and self.contents.certificate is not None:
            certificate = certificate._replace(client_ca=self.contents.certificate.client_ca)
        self.contents = self.contents._replace(certificate=certificate)
        return certificate is not None

    def watch_keys(self, changed: Callable[[], None]) -> Watch:
        """Return a watch that calls `changed` when the file of keys changes."""
        return Watch(filter(_changes, [self._settings.api_keys_file]), changed)

    def watch_certificate(self, changed: Callable[[], None]) -> Watch:
        return Watch(filter(_changes, [self._settings.tls_cert, self._settings.tls_key]), changed)


def _changes(path: Path | None) -> bool:
    try:
        return path is not None and is_regular(path)  # a pipe is read once
    except OSError:  # the file was removed just now; it may come back
        return True


class Shared:
    """The contents in memory that one process writes and others read, by a descriptor that they inherit."""

    def __init__(self, contents: Contents) -> None:
        self.fd = os.memfd_create("flashpoint-files", os.MFD_CLOEXEC)
        self.write(contents)

    def write(self, contents: Contents) -> None:
        """Replace the contents. Raises OSError if there is no memory, and then leaves them unchanged."""
        text = pickle.dumps(tuple(contents))
        text = hashlib.sha256(text).digest() + text
        os.posix_fallocate(self.fd, 0, len(text))
        os.pwrite(self.fd, text, 0)
        os.ftruncate(self.fd, len(text))


class HandedFiles(Files):
    """The files, as another process has read them. Raises OSError if it does not end to write them."""

    def __init__(self, settings: Settings, fd: int) -> None:
        self._settings = settings
        self._fd = fd
        self.contents = self._handed()

    def _handed(self) -> Contents:
        for _ in range(_TRIES):
            text = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            if hashlib.sha256(text[_DIGEST:]).digest() == text[:_DIGEST]:
                return Contents(*pickle.loads(text[_DIGEST:]))
            time.sleep(_PAUSE)
        raise OSError("the supervisor has not handed over the keys and certificates")

    def refresh_keys(self) -> bool:
        before, keys = self.contents.keys, self._handed().keys
        self.contents = self.contents._replace(keys=keys)
        return keys != before

    def refresh_certificate(self) -> bool:
        before, certificate = self.contents.certificate, self._handed().certificate
        self.contents = self.contents._replace(certificate=certificate)
        return certificate != before

    def watch_keys(self, changed: Callable[[], None]) -> Watch:
        return Watch([], changed)  # the supervisor sends SIGHUP after a change

    def watch_certificate(self, changed: Callable[[], None]) -> Watch:
        return Watch([], changed)
