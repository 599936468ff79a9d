"""A strict reader of the server's HTTP/1.1 answers. It raises an error for every answer that is not valid."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [A-Za-z' -]*")
_FIELD = re.compile(rb"([a-z0-9-]+): ([\x20-\x7e]*)")
LONGEST_HEAD = 1 << 16


class NotHttpError(AssertionError):
    """The server sent bytes that no client can read as HTTP."""


@dataclass
class Answer:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        """Return the error code of a problem document, or None if the body is not a problem document."""
        return json.loads(self.body).get("code") if "problem" in self.fields.get("content-type", "") else None


async def read_answer(reader: asyncio.StreamReader, method: str = "POST") -> Answer | None:
    """Return the next answer, without "100 Continue" answers, or None if the connection has ended.

    Raises NotHttpError if the answer is invalid or incomplete.
    """
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise NotHttpError(f"it ends within a head: {error.partial!r}") from None
            return None
        status_line, *lines = head[:-4].split(b"\r\n")
        if not (status := _STATUS.fullmatch(status_line)):
            raise NotHttpError(f"no status line: {status_line!r}")
        fields: dict[str, str] = {}
        for line in lines:
            if not (field := _FIELD.fullmatch(line)):
                raise NotHttpError(f"no field: {line!r}")
            name = field[1].decode()
            if name in fields and name in ("content-length", "content-type", "x-request-id"):
                raise NotHttpError(f"{name} twice")
            fields[name] = field[2].decode()
        if status[1] != b"100":
            break
    if ("content-length" in fields) == ("transfer-encoding" in fields):
        raise NotHttpError(f"no length, or two: {fields}")
    try:
        body = b"" if method == "HEAD" else await _body(reader, fields)
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise NotHttpError(f"half a body: {error}") from None
    return Answer(int(status[1]), fields, body)


async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if "content-length" in fields:
        return await reader.readexactly(int(fields["content-length"]))
    body = b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    await reader.readuntil(b"\r\n")
    return body
