"""Run the application in a process: listen on a socket, handle signals, and shut down gracefully.

After SIGTERM or SIGINT the server is not ready and refuses new requests. It answers the admitted ones within
`shutdown_timeout` and exits with 0. A second signal ends it at once, with 1. After SIGHUP it reads keys and certificate
again.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn
from fastapi import FastAPI

from flashpoint_server.app import create_app
from flashpoint_server.cli import ports, supervisor
from flashpoint_server.cli.hangup import HANGUP, NOTHING_TO_REREAD
from flashpoint_server.config import tls
from flashpoint_server.config.files import Files
from flashpoint_server.config.settings import Settings
from flashpoint_server.http import closing, steps
from flashpoint_server.http.ending import Config
from flashpoint_server.http.envelope import refuse_outside
from flashpoint_server.http.half_closed import HalfClosed
from flashpoint_server.http.protocol import PROTOCOLS, HttpProtocol
from flashpoint_server.ipc.client import State
from flashpoint_server.observability import logs
from flashpoint_server.processes.parent import keep_what_is_there, raise_descriptor_limit
from flashpoint_server.service import Service

if TYPE_CHECKING:
    from flashpoint_server.oip.grpc.server import RpcServer

WARNING_SECONDS = 60  # seconds between two equal warnings
LAST_BYTES = 1  # seconds at shutdown, after all admitted requests have ended, for sending the last error answers

log = structlog.stdlib.get_logger("flashpoint.serving")


class _Server(uvicorn.Server):
    """uvicorn's server. It drains before it stops, and stops if its engine cannot start."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._service: Service = app.state.service
        self._statistics = app.state.statistics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grpc: RpcServer | None = None
        self.failed = False  # whether the server could not listen for gRPC
        self.forced = False  # whether a second signal has arrived
        self._draining: asyncio.Task[None] | None = None
        self._next_warning = 0.0
        self._certificate = self._service.files.watch_certificate(self._reload_certificate)
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        if self._service.settings.grpc_port is not None and not await self._listen_for_grpc():
            self.failed = self.should_exit = True
            return
        await super().startup(sockets)
        keep_what_is_there()
        steps.listening()
        self._tasks.append(asyncio.ensure_future(self._certificate.run()))
        HANGUP.listen(lambda: loop.call_soon_threadsafe(self._reload))
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            url = f"{'https' if self.config.ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("listening", host=host, port=port, url=url)
        settings = self._service.settings
        if sockets and settings.workers == 1 and logs.for_people(settings.log_format):
            self._tasks.append(asyncio.ensure_future(self._invite(url.replace("//127.0.0.1:", "//localhost:"))))

    async def _invite(self, url: str) -> None:
        """Wait until the service is ready, then log the URL of its web page."""
        while not self._service.ready:  # noqa: ASYNC110 (it follows from the states of several processes)
            await asyncio.sleep(0.05)
        log.info(f"Open {url}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        HANGUP.listen(None)
        if self._grpc is not None:
            await self._grpc.stop(0 if self.forced else LAST_BYTES)
        listeners = sockets or []
        if self._service.settings.workers == 1:  # else other workers, or the supervisor, accept what waits
            for listener in listeners:
                closing.refuse_new(listener)
            await closing.drained(listeners)
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()
        unanswered = await closing.close(self.server_state.connections, now=self.forced)  # type: ignore[arg-type]
        self._service.metrics.unanswered(unanswered)
        if tasks := set(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=LAST_BYTES)
        await self.lifespan.shutdown()

    async def _listen_for_grpc(self) -> bool:
        from flashpoint_server.oip.grpc.server import RpcServer  # the import needs the extra `grpc`

        settings = self._service.settings
        try:
            address = ports.address(settings)
            self._grpc = RpcServer(self.config.loaded_app, self._service, self._statistics, address)
        except OSError as error:
            log.error("cannot listen", **ports.why(error, settings.host, settings.grpc_port, "--grpc-port"))
            return False
        await self._grpc.start()
        log.info("listening for gRPC", host=settings.host, port=self._grpc.port)
        return True

    def _reload(self) -> None:
        """Handle SIGHUP: read keys and certificate again. If one is not valid, keep the present one and log it."""
        settings = self._service.settings
        if not settings.rereads:
            log.info(NOTHING_TO_REREAD)
            return
        self._service.reload_keys()
        self._reload_certificate()

    def _reload_certificate(self) -> None:
        files = self._service.files
        if self.config.ssl is not None:
            try:
                if not files.refresh_certificate() or (certificate := files.contents.certificate) is None:
                    return
                tls.load(self.config.ssl, certificate)
                self._service.metrics.certificate(tls.expiry(certificate.cert))
                if self._grpc is not None:
                    self._grpc.reload()
            except (OSError, ValueError) as error:
                log.error("certificate kept", error=str(error))
            else:
                log.info("certificate loaded")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            self.should_exit = True
        else:  # a signal handler runs between any two bytecodes, so leave the work to the event loop
            self._loop.call_soon_threadsafe(self._begin_drain, sig)

    def _begin_drain(self, sig: int) -> None:
        log.info("draining", signal=signal.Signals(sig).name)
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.forced = True
            self._abandon()

    async def _drain(self) -> None:
        if not await self._service.drain():
            self._abandon()
        self.should_exit = True

    def _abandon(self) -> None:
        log.warning("abandoned", requests=self._service.admission.requests)
        self._service.engine.close()
        self.should_exit = True

    def _look_for_descriptors(self, now: float) -> None:
        """Log an error if no file descriptor is free: the event loop then drops new connections silently."""
        try:
            os.close(os.eventfd(0))
        except OSError as error:
            if now >= self._next_warning:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log.error("connections are dropped", error=str(error), limit=limit, advice="raise ulimit -n")
                self._next_warning = now + WARNING_SECONDS

    async def on_tick(self, counter: int) -> bool:
        self._look_for_descriptors(time.monotonic())
        return await super().on_tick(counter) or self._service.engine.state is State.FAILED


def run(settings: Settings) -> int:
    """Serve until a signal arrives. Return the exit code.

    It is 1 if the server cannot listen or an engine cannot work, and with one worker, if a second signal ended it.
    """
    try:
        files = Files(settings)
    except ValueError as error:
        log.error("cannot start", error=str(error))
        return 1
    with ExitStack() as inside:
        if (listener := ports.listen(settings)) is None:
            return 1
        inside.enter_context(listener)
        if settings.grpc_port is not None:
            if (reserved := ports.reserve(settings)) is None:
                return 1
            inside.enter_context(reserved)
            settings = settings.model_copy(update={"grpc_port": reserved.getsockname()[1]})
        if (address := ports.open_to_all(settings)) is not None:
            log.warning("open to all who reach it", host=address, advice="set --api-keys-file, or --host 127.0.0.1")
        if settings.workers == 1:
            return serve_on(listener, create_app(settings, files=files))
        return supervisor.run(settings, listener, files)


def serve_on(listener: socket.socket, app: FastAPI) -> int:
    """Serve an application of `create_app` on a listening socket, in this process. Return the exit code, like `run`."""
    raise_descriptor_limit()
    service: Service = app.state.service
    settings = service.settings
    if ip_address(listener.getsockname()[0]).is_loopback and not service.keys.locked:
        service.sites.only_loopback()
    config = Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the service does not use the client's address
        workers=1,  # otherwise uvicorn reads WEB_CONCURRENCY, which may be no number
        forwarded_allow_ips="",  # otherwise it reads FORWARDED_ALLOW_IPS
        timeout_keep_alive=settings.keep_alive,
    )
    config.loop_class = steps.loop_class(*PROTOCOLS)
    config.header_timeout = settings.header_timeout
    # Longer than a route's timeout for a small answer: the route's must expire first, because only that one is logged.
    config.answer_timeout = 2 * settings.body_timeout
    config.refuse, config.half_closed = partial(refuse_outside, service.metrics.ended), HalfClosed()
    config.load()
    if (certificate := service.files.contents.certificate) is not None:
        config.ssl = tls.context(certificate)
        service.metrics.certificate(tls.expiry(certificate.cert))
    server = _Server(config, app)
    server.run(sockets=[listener])
    if service.engine.failure:
        log.error("failed", reason=service.engine.failure)
        return 1
    log.info("stopped")
    return int(server.forced or server.failed)
