"""Raw HTTP requests for the fuzzer, most of them invalid. A `Case` has the bytes to send and the allowed answers.

`Case.allowed` has the allowed statuses; `GONE` means that the server ended the connection. Some bodies and fields
contain a second request, for the path `SMUGGLED`. The server must never execute this request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

GONE = 0
SMUGGLED = "/attention/events"  # not a route of the server; a request to it would show in the log

# `REFUSED` has the usual statuses for an invalid head; `OTHERWISE` is the default of `Case.allowed`. 408 and `GONE`
# occur if the head stays incomplete, 429 if it announces too many bytes, 504 if it sets a deadline. 500 is not allowed.
REFUSED = frozenset({400, 413, 414, 431, 501, 505})
OTHERWISE = frozenset({GONE, 200, 404, 405, 406, 408, 411, 415, 417, 421, 422, 429, 504}) | REFUSED


@dataclass(frozen=True)
class Case:
    """The bytes that a client sends, and the allowed answers.

    pieces: the bytes, in the pieces that are written to the socket one by one
    allowed: the allowed statuses, if `exact` is 0
    exact: the number of answers with status 200 and the expected body that must come
    ends: the client's action after sending: it reads answers (`waits`), shuts down its sending side and reads
        (`half`), closes the connection (`close`), or resets it (`reset`)
    """

    name: str
    pieces: tuple[bytes, ...]
    allowed: frozenset[int] = OTHERWISE
    exact: int = 0
    ends: str = "waits"


def head(body: bytes, *fields: str, path: str = "/attention", length: bool = True, version: str = "1.1") -> bytes:
    """Return the head of a POST request with these fields. It is valid unless `fields` makes it invalid."""
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/vnd.safetensors", *fields]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def chunked(body: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in parts) + b"0\r\n" + trailer + b"\r\n"


def split_anywhere(body: bytes) -> Iterator[Case]:
    """Yield a valid request cut into two pieces at each position, into single bytes, and into chunks of many sizes."""
    whole = head(body) + body
    for at in range(1, len(whole)):
        yield Case(f"cut at {at}", (whole[:at], whole[at:]), exact=1)
    yield Case("a byte at a time", tuple(whole[i : i + 1] for i in range(len(whole))), exact=1)
    te = head(body, "Transfer-Encoding: chunked", length=False)
    for size in (1, 2, 3, 7, 8, 9, 64, len(body)):
        yield Case(f"chunks of {size}", (te, chunked(body, size)), exact=1)
    for at in range(1, len(body)):
        yield Case(f"chunk cut at {at}", (te, chunked(body[:at], at)[:-5] + chunked(body[at:], len(body))), exact=1)
    text = te + chunked(body, 16)
    yield Case("chunks a byte at a time", tuple(text[i : i + 1] for i in range(len(text))), exact=1)
    yield Case("chunk extensions", (te, chunked(body, 9, b';a=b;c="d"')))
    yield Case("a trailer", (te, chunked(body, 9, trailer=b"X-Trailer: 1\r\nContent-Length: 3\r\n")))
    yield Case("leading zeros", (te, b"0000000000%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)))


def lengths(body: bytes) -> Iterator[Case]:
    inner = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % SMUGGLED.encode()
    wrong = REFUSED | {GONE}
    for value in (
        "-1",
        "+5",
        "0x10",
        "1e3",
        "5 5",
        "5, 5",
        "5,6",
        "",
        "٣",
        "1_0",
        "9" * 40,
        str(1 << 64),
        "18446744073709551616",
    ):
        length_text = value.encode().decode("latin-1")
        yield Case(
            f"length {value}", (head(body, f"Content-Length: {length_text}", length=False) + body + inner,), wrong
        )
    yield Case("a length twice", (head(body, f"Content-Length: {len(body)}") + body + inner,), wrong)
    yield Case("two lengths", (head(body, "Content-Length: 5") + body + inner,), wrong)
    yield Case("both lengths", (head(body, "Transfer-Encoding: chunked") + chunked(body, 9) + inner,), wrong)
    te_first = head(body, f"Content-Length: {len(body)}", "Transfer-Encoding: chunked", length=False)
    yield Case("both, the other way", (te_first + chunked(body, 9) + inner,), wrong)
    zero = head(b"", "Content-Length: 0", "Transfer-Encoding: chunked", length=False)
    yield Case("both, and none is needed", (zero + b"0\r\n\r\n" + inner,), wrong)
    for coding in (
        "gzip",
        "chunked, gzip",
        "gzip, chunked",
        "identity",
        "xchunked",
        "chunked;q=1",
        "chunked\x0b",
        "chunke",
        '"chunked"',
        "chunked, chunked",
        "CHUNKED ",
        "\tchunked",
    ):
        first = head(body, f"Transfer-Encoding: {coding}", length=False)
        yield Case(f"coding {coding!r}", (first + chunked(body, 9),))
        both = head(body, f"Transfer-Encoding: {coding}")
        yield Case(f"coding {coding!r} and a length", (both + body[:-1],))
    two = head(body, "Transfer-Encoding: identity", "Transfer-Encoding: chunked", length=False)
    yield Case("two codings", (two + chunked(body, 9),))
    for field in (
        "Transfer-Encoding : chunked",
        " Transfer-Encoding: chunked",
        "Transfer-Encoding:\r\n chunked",
        "Transfer_Encoding: chunked",
        "X: y\rTransfer-Encoding: chunked",
        "X: y\nTransfer-Encoding: chunked",
        "X: \x00\r\nTransfer-Encoding: chunked",
        "Content-Length\x00: 3",
    ):
        yield Case(f"hidden {field!r}", (head(body, field) + b"0\r\n\r\n" + bytes(max(0, len(body) - 5)),))


def chunks(body: bytes) -> Iterator[Case]:
    te = head(body, "Transfer-Encoding: chunked", length=False)
    inner = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" % SMUGGLED.encode()
    for size in (
        b"-1",
        b"+9",
        b"0x9",
        b"9 9",
        b"",
        b"g",
        b"F" * 17,
        b"8" + b"0" * 16,
        b"7" + b"F" * 15,
        b" 9",
        b"9;\x00",
        b"\x00",
    ):
        yield Case(
            f"chunk size {size!r}", (te + size + b"\r\n" + body + b"\r\n0\r\n\r\n" + inner,), REFUSED | {GONE, 408, 422}
        )
    yield Case("chunk without its end", (te + b"%x\r\n" % len(body) + body + b"0\r\n\r\n" + inner,), REFUSED | {GONE})
    yield Case("chunk longer than said", (te + b"5\r\n" + body + b"\r\n0\r\n\r\n" + inner,), REFUSED | {GONE})
    yield Case("bare line feeds", (te + b"%x\n" % len(body) + body + b"\n0\n\n",))
    yield Case("an endless extension", (te + b"5;" + b"a" * (1 << 17),))
    yield Case("endless trailers", (te + chunked(body, 99)[:-2] + b"X-T: 1\r\n" * (1 << 14),))


def fields(body: bytes) -> Iterator[Case]:
    inner = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % SMUGGLED.encode()
    for name, field in {
        "NUL in a value": "X-A: a\x00b",
        "NUL in a name": "X\x00A: b",
        "no name": ": b",
        "no colon": "garbage",
        "a space in a name": "X A: b",
        "bare return": "X-A: a\rb",
        "folded": "X-A: a\r\n b",
        "latin": "X-A: \xff\xfe\x80",
        "controls": "X-A: \x01\x02\x7f",
        "long": "X-A: " + "a" * 60_000,
        "longer": "X-A: " + "a" * 200_000,
        "a long name": "X" * 60_000 + ": a",
        "Host twice": "Host: other",
        "an id of lies": "X-Request-Id: a\tb\x80",
        "types": "Content-Type: application/json",
        "timeout": "X-Timeout-Ms: 1\xb2",
        "timeouts": "X-Timeout-Ms: 5\r\nX-Timeout-Ms: 6",
        "priority": "X-Priority: \xb3",
        "accept": "Accept: " + ",".join(["*/*;q=nan"] * 500),
        "coding": "Content-Encoding: gzip",
        "trace": "traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-ff",
        "key": "Authorization: Bearer \xff\x00",
        "many": "\r\n".join(f"X-{i}: {i}" for i in range(1000)),
        "empty": "X-A:",
        "range": "Range: bytes=0-9999999999999999999",
    }.items():
        yield Case(f"field: {name}", (head(body, field) + body,))
    yield Case("no Host", (head(body).replace(b"Host: localhost\r\n", b"") + body,))
    yield Case("bare line feeds in a head", (head(body).replace(b"\r\n", b"\n") + body,))
    yield Case("a head without an end", (head(body)[:-2],), ends="close")
    for expect in ("100-continue", "100-Continue", "200-ok", ""):
        yield Case(f"expect {expect}", (head(body, f"Expect: {expect}"), body))
    for upgrade in ("h2c", "websocket", "TLS/1.0", "\x00"):
        more = "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAMAAABkAAQAAP__"
        yield Case(f"upgrade {upgrade!r}", (head(body, *more) + body,))
        yield Case(f"upgrade {upgrade!r} before a request", (head(inner, *more), inner), OTHERWISE - {404})
        yield Case(f"upgrade {upgrade!r} without a body", (head(b"", *more) + b"\x00\x01\x02",))


def request_lines(body: bytes) -> Iterator[Case]:
    rest = head(body).partition(b"\r\n")[2] + body
    for line in (
        b"POST /attention HTTP/1.0",
        b"POST /attention HTTP/0.9",
        b"POST /attention HTTP/9.9",
        b"POST /attention HTTP/1.1 ",
        b"POST /attention",
        b"POST  /attention HTTP/1.1",
        b"post /attention HTTP/1.1",
        b"P\x00ST /attention HTTP/1.1",
        b"FETCH /attention HTTP/1.1",
        b"CONNECT fuzz:80 HTTP/1.1",
        b"CONNECT /attention HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"TRACE /attention HTTP/1.1",
        b"POST http://fuzz/attention HTTP/1.1",
        b"POST //attention HTTP/1.1",
        b"POST * HTTP/1.1",
        b"POST /attention?a=\xff HTTP/1.1",
        b"POST /\xff\xfe HTTP/1.1",
        b"POST /%00 HTTP/1.1",
        b"POST /%ff%fe HTTP/1.1",
        b"POST /% HTTP/1.1",
        b"POST /attention%2f..%2f HTTP/1.1",
        b"POST /../attention HTTP/1.1",
        b"POST /v2/models/%0a/infer HTTP/1.1",
        b"POST /v2/models/attention/infer HTTP/1.1",
        b"POST /attention#x HTTP/1.1",
        b"POST /" + b"a" * 60_000 + b" HTTP/1.1",
        b"GET /benchmark/%2e%2e HTTP/1.1",
        b"DELETE /benchmark/\xc3\xa9 HTTP/1.1",
        b"POST http://[::1 HTTP/1.1",
        b"POST :80 HTTP/1.1",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 200 OK",
        b"",
        b"\r\n\r\n\r\nPOST /attention HTTP/1.1",
        b"GET /page/../../settings.py HTTP/1.1",
        b"HEAD /attention HTTP/1.1",
    ):
        yield Case(f"line {line[:40]!r}", (line + b"\r\n" + rest,))


def strangers() -> Iterator[Case]:
    hello = bytes.fromhex("16030100c8010000c40303") + bytes(range(200))
    for name, data in {
        "TLS": hello,
        "TLS alert": bytes.fromhex("15030300020228"),
        "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
        "zeros": bytes(5000),
        "SMTP": b"EHLO fuzz\r\n",
        "RTSP": b"OPTIONS * RTSP/1.0\r\n\r\n",
        "redis": b"*1\r\n$4\r\nPING\r\n",
        "ones": b"\xff" * 5000,
        "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
        "spaces": b" " * 100_000,
        "blank lines": b"\r\n" * 50_000,
        "line feeds": b"\n" * 100_000,
    }.items():
        yield Case(f"stranger: {name}", (data,), REFUSED | {GONE}, ends="close")


def pipelines(body: bytes) -> Iterator[Case]:
    one = head(body) + body
    te = head(body, "Transfer-Encoding: chunked", length=False) + chunked(body, 11)
    for n in (2, 3, 20):
        yield Case(f"{n} at once", (one * n,), exact=n)
        yield Case(f"{n} at once, in chunks", (te * n,), exact=n)
        yield Case(f"{n} at once, of both kinds", ((one + te) * n,), exact=2 * n)
    wish = head(body, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__") + body
    yield Case("a wish for another protocol, and one without", (wish + one,), exact=2)
    yield Case("many wishes", (wish * 20,), exact=20)
    yield Case("two, cut in the second's head", (one + one[:50], one[50:]), exact=2)
    yield Case("two, cut in the second's body", (one + one[:-9], one[-9:]), exact=2)
    yield Case("blank lines between", (one + b"\r\n\r\n" + one,))
    yield Case("garbage behind", (one + b"\x00\xff garbage\r\n\r\n",))
    yield Case("one that is last, and another", (head(body, "Connection: close") + body + one,))
    yield Case("a refused one, and another", (head(body[:-1]) + body[:-1] + one,))
    yield Case(
        "a refused one in chunks", (head(b"", "Transfer-Encoding: chunked", length=False) + b"3\r\nabc\r\n" + one,)
    )


def gone(body: bytes, rng: Random) -> Iterator[Case]:
    """Yield requests cut at random positions, after which the client closes, resets or half-closes the connection."""
    whole = head(body) + body
    te = head(body, "Transfer-Encoding: chunked", length=False) + chunked(body, 11)
    for ends in ("close", "reset", "half"):
        for text in (whole, te):
            for at in sorted({rng.randrange(1, len(text)) for _ in range(6)} | {len(text)}):
                yield Case(f"{ends} after {at}", (text[:at],), ends=ends)


def slow(body: bytes) -> Iterator[Case]:
    """Yield requests that stop inside a head, a body or a chunk."""
    whole = head(body) + body
    te = head(body, "Transfer-Encoding: chunked", length=False) + chunked(body, 11)
    stalled = frozenset({408, GONE})
    yield Case("a body that stops", (whole[:-7],), stalled)
    yield Case("a body that never begins", (head(body),), stalled)
    yield Case("a body that stops after eight bytes", (head(body) + body[:8],), stalled)
    yield Case("chunks that stop", (te[:-30],), stalled)
    yield Case("chunks without the last", (te[:-5],), stalled)
    yield Case(
        "a promise of 2^40 bytes",
        (head(body, f"Content-Length: {1 << 40}", length=False) + body,),
        frozenset({400, 413}),
    )


def mutated(body: bytes, rng: Random, count: int) -> Iterator[Case]:
    """Yield `count` valid requests with random bytes changed, removed or repeated, or with pieces of HTTP inserted."""
    tokens = (
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b":",
        b" ",
        b"\t",
        b"0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 7\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"HTTP/1.0",
        b"GET / ",
        b"Content-Encoding: deflate\r\n",
        b"X-Timeout-Ms: 1\r\n",
        b"Accept: application/json\r\n",
        b"\xff",
        struct.pack("<Q", 1 << 62),
    )
    texts = (
        head(body) + body,
        head(body, "Transfer-Encoding: chunked", length=False) + chunked(body, 13),
        head(body, path="/attention/grad") + body,
        (head(body) + body) * 2,
        b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head(body, "Inference-Header-Content-Length: 20", path="/v2/models/attention/infer") + body,
    )
    for number in range(count):
        text = bytearray(rng.choice(texts))
        for _ in range(rng.choice((1, 1, 2, 4))):
            # Change the head more often than the body: tests/fuzz/targets.py already fuzzes bodies.
            at = rng.randrange(min(len(text), rng.choice((250, len(text)))))
            how = rng.randrange(5)
            if how == 0:
                text[at] = rng.randrange(256)
            elif how == 1:
                del text[at : at + rng.choice((1, 2, 20))]
            elif how == 2:
                text[at:at] = rng.choice(tokens)
            elif how == 3:
                text[at:at] = text[at : at + rng.randrange(1, 40)]
            else:
                text[at] = text[at] ^ (1 << rng.randrange(8))
            text = text or bytearray(b"x")
        cut = rng.randrange(len(text))
        yield Case(f"mutated {number}", (bytes(text[:cut]), bytes(text[cut:])))


def all_cases(body: bytes, seed: int, count: int) -> Iterator[Case]:
    """Yield all cases: first those that ignore the seed, then the random ones, with `count` mutated requests."""
    rng = Random(seed)
    for family in (split_anywhere, lengths, chunks, fields, request_lines, pipelines, slow):
        yield from family(body)
    yield from strangers()
    yield from gone(body, rng)
    yield from mutated(body, rng, count)
