"""The service on Ray Serve: `serve run flashpoint_server.ray:app device=cuda`, a replica a device.

A replica runs the application of `flashpoint serve`, its queue, its batches and its engine included. Ray's proxies hand
it whole HTTP requests; nothing of Ray's batches, and no deployment handle lies between.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashpoint_server.app import Application, create_app
from flashpoint_server.autoscaling import WAITING
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.client import Engines, State
from flashpoint_server.ipc.parent import raise_descriptor_limit
from flashpoint_server.observability import logs
from flashpoint_server.refusal import Refusal

_SOCKET = "Ray's proxies have the sockets: see http_options"
NOT_HERE = {
    **dict.fromkeys(("host", "port", "insecure", "keep_alive", "header_timeout"), _SOCKET),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"), _SOCKET),
    **dict.fromkeys(("grpc_port", "grpc_bytes"), "Ray's proxies hand on HTTP alone"),
    "workers": "a replica is one process: see num_replicas",
    "replica": "every replica has a name of its own, which it draws",
    "shared_memory_bytes": "a region is registered with one process, and Ray has several to choose from",
}
THE_IMAGES = {"host", "port", "insecure"}  # that the image has as variables, for `flashpoint serve`
READY_SECONDS = 0.05  # between two looks at an engine that starts
END_SECONDS = 5.0  # beyond the shutdown timeout: the engine's end, and Ray's own


class UnstampedId:
    """ASGI middleware: the answer's id is left to Ray, which hands it to us and stamps it on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unstamped_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [field for field in message["headers"] if field[0] != b"x-request-id"]
            await send(message)

        await self.app(scope, receive, unstamped_send)


@serve.deployment(name="Flashpoint")
@serve.ingress()
class Replica:
    """One process of Ray's, with the application and, below it, the engine of its device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engines: Engines

    def __serve_build_asgi_app__(self) -> Application:
        """Called by Ray, which then runs the lifespan: that starts the engine, and ends it behind the last answer."""
        logs.configure(self._settings.log_format, self._settings.log_level)
        raise_descriptor_limit()
        app = create_app(self._settings)
        assert isinstance(app, Application)
        app.add_middleware(UnstampedId)
        app.posts = {path: UnstampedId(route) for path, route in app.posts.items()}
        self._engines = app.state.service.engine
        return app

    async def check_health(self) -> None:
        """Called by Ray before it sends the first request, and every `health_check_period_s`.

        Returns once the engine is ready. Raises RuntimeError where it cannot work here: Ray starts another replica.
        """
        while self._engines.state is State.STARTING:  # noqa: ASYNC110  # nobody says that it has changed
            await asyncio.sleep(READY_SECONDS)
        device = self._engines.device
        if device is None:
            raise RuntimeError(f"the engine cannot work here: {self._engines.failure}")
        if device.name != "cpu" and not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
            raise RuntimeError(f"{device.name} is not this replica's: ask Ray for one each, with device=cuda")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray, for the autoscaling policy."""
        return {WAITING: self._engines.waiting_seconds}


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and for a configuration's `import_path`; `arguments` are names of `Settings`.

    Those that are not there are the FLASHPOINT_* variables, and the defaults. Raises ValidationError and ValueError,
    naming the setting.
    """
    settings = Settings(**arguments)
    for name in settings.model_fields_set & NOT_HERE.keys() - (THE_IMAGES - arguments.keys()):
        raise ValueError(f"{name}: not a setting on Ray Serve: {NOT_HERE[name]}")
    if settings.device == "all" or ":" in settings.device:
        raise ValueError(f"device: {settings.device} is not for Ray Serve, which gives each replica a device: say cuda")
    return Replica.options(  # type: ignore[attr-defined, no-any-return]
        # We refuse before Ray does: it lets twice as many in as we do, so that those we refuse, and probes, have room.
        max_ongoing_requests=2 * settings.queue_limit,
        max_queued_requests=8 * settings.queue_limit,  # of a burst all count until Ray has found each its replica
        backpressure_config={"retry_after_s": float(Refusal("queue_full", "").headers["Retry-After"])},
        graceful_shutdown_timeout_s=settings.shutdown_timeout + END_SECONDS,
        logging_config={"enable_access_log": False},  # a request has a line of ours
        ray_actor_options={"num_gpus": int(settings.device == "cuda")},
    ).bind(settings)
