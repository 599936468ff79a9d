"""Send the questions of a `Work` to the servers: `run` with threads, `run_async` with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from flashpoint._client.async_client import AsyncClient
from flashpoint._client.client import Client
from flashpoint._http.exchange import Exchange
from flashpoint._shards.work import Item, Work
from flashpoint.errors import FlashpointError


def run(work: Work, clients: Sequence[Client], sending: dict[str, Any]) -> None:
    """Send every question of `work`, and store the answers in `work`. Each client has a thread.

    An error that `Work` does not retry ends all threads, and is raised.
    """
    for client in clients:  # before threads start
        client._ready_to_call()
    theirs, ours = socket.socketpair()  # when `theirs` becomes readable, the calls of all threads end
    turn = threading.Condition()
    stopped = threading.Event()

    def serve(server: int) -> None:
        while True:
            with turn:
                while (item := None if work.over else work.take(server)) is None:
                    if work.over or stopped.is_set():
                        return
                    turn.wait(work.patience(server))
            try:
                answer = clients[server]._run(_exchange(clients[server], work, item, sending, theirs))
            except FlashpointError as error:
                with turn:
                    if stopped.is_set():
                        return
                    rest = work.failed(server, item, error)
                    turn.notify_all()
                    turn.wait_for(stopped.is_set, rest)
            else:
                with turn:
                    work.done(server, item, answer)

    with theirs, ours, ThreadPoolExecutor(len(clients), "flashpoint-shard") as pool:
        try:
            # The copied context passes the caller's trace to the threads.
            threads = [pool.submit(contextvars.copy_context().run, serve, i) for i in range(len(clients))]
            ended, _ = wait(threads, return_when=FIRST_COMPLETED)
            _raise_unless_over(work, ended)
        finally:
            with turn:
                stopped.set()
                turn.notify_all()
            ours.send(b"\0")


async def run_async(work: Work, clients: Sequence[AsyncClient], sending: dict[str, Any]) -> None:
    """Do the same as `run`, with one task for each client. If it is cancelled, it cancels all tasks."""
    changed = asyncio.Event()

    async def serve(server: int) -> None:
        while not work.over:
            item = work.take(server)
            if item is None:
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), work.patience(server))
                continue
            try:
                answer = await clients[server]._run(_exchange(clients[server], work, item, sending))
            except FlashpointError as error:
                rest = work.failed(server, item, error)
                changed.set()
                await asyncio.sleep(rest)
            else:
                work.done(server, item, answer)

    tasks = [asyncio.create_task(serve(i)) for i in range(len(clients))]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        _raise_unless_over(work, ended)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _exchange(
    client: Client | AsyncClient, work: Work, item: Item, sending: dict[str, Any], stop: socket.socket | None = None
) -> Exchange:
    """Return an `Exchange` that makes one attempt: `Work` decides which server gets a failed question next."""
    return client._exchange(replace(item.question.call(sending), timeout=work.timeout()), once=True, stop=stop)


def _raise_unless_over(work: Work, ended: Iterable[Future[None] | asyncio.Task[None]]) -> None:
    """Raise the error of a worker that ended, unless all work is done."""
    for one in ended:
        if not work.over:
            one.result()
