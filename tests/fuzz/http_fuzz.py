"""Send the cases of http_cases.py to a server, AT_A_TIME at once, and check the answers to each case."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fuzz.http_answers import Answer, NotHttpError, read_answer
from tests.fuzz.http_cases import GONE, Case

AT_A_TIME = 32
# Seconds to wait for an answer that need not come: the server may wait for the rest of the request. Then the client
# closes the connection.
PATIENCE = 3.0
HANG = 120.0  # seconds for an answer that must come, on a busy machine
LATE = 0.5  # seconds; the server may answer 408 to a valid request whose sending takes longer
TRIES = 5  # attempts for a request that was sent too slowly


@dataclass
class Report:
    """The number of cases, the number of answers with each status (`GONE` included), and a line per wrong answer."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def attack(port: int, cases: Iterable[Case], expected: bytes) -> Report:
    """Send the cases and return the report. `expected` is the body of the right answer to the valid request."""
    report, waiting = Report(), iter(cases)

    async def work() -> None:
        for case in waiting:
            report.cases += 1
            for last in (*[False] * (TRIES - 1), True):
                if await _try(port, case, expected, report, last):
                    break

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_A_TIME):
            tasks.create_task(work())
    return report


async def _try(port: int, case: Case, expected: bytes, report: Report, last: bool) -> bool:
    """Send a case, and add its answers and errors to `report`.

    Return False, and add nothing, if the case was sent too slowly and must be sent again. The `last` try always counts.
    """
    clock = asyncio.get_running_loop().time
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answers: list[Answer] = []
    ended = late = False
    began = clock()
    try:
        with contextlib.suppress(ConnectionError):
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            late = bool(case.exact) and clock() - began > LATE
            if case.ends == "half":
                writer.write_eof()
            if case.ends in ("close", "reset"):
                return True
            must = case.exact or int(case.ends == "waits" and GONE not in case.allowed)
            while not ended:
                async with asyncio.timeout(HANG if len(answers) < must else PATIENCE):
                    answer = await read_answer(reader, _method(case))
                if answer is None:
                    ended = True
                else:
                    answers.append(answer)
                    if len(answers) == case.exact:
                        break
    except TimeoutError:
        pass
    except NotHttpError as error:
        report.wrong.append(f"{case.name}: {error}")
    finally:
        if case.ends == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        again = late and not last and any(answer.status == 408 for answer in answers)
        if not again:
            _judge(case, answers, ended, expected, report)
    return not again


def _method(case: Case) -> str:
    return "HEAD" if case.pieces[0].startswith(b"HEAD ") else "POST"


def _judge(case: Case, answers: list[Answer], ended: bool, expected: bytes, report: Report) -> None:
    statuses = [answer.status for answer in answers]
    report.statuses.update(statuses or ([GONE] if ended else []))
    if case.exact:
        right = [a for a in answers if a.status == 200 and a.body == expected]
        if len(right) != case.exact:
            report.wrong.append(f"{case.name}: {statuses}, {len(right)} of {case.exact} right")
    elif bad := [status for status in statuses if status not in case.allowed]:
        report.wrong.append(f"{case.name}: {bad} of {statuses}, where {sorted(case.allowed)} may come")
    elif case.ends == "waits" and GONE not in case.allowed and not statuses:
        report.wrong.append(f"{case.name}: no answer, where {sorted(case.allowed)} may come")
