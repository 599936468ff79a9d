"""The service on Ray Serve: `serve run flashpoint_server.ray:app device=cuda`, one replica for each device.

A replica runs the same application as `flashpoint serve`, with its queue, its batches and its engine. Ray's proxies
pass whole HTTP requests to it; Ray's batching and deployment handles are not used.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashpoint_server.app import create_app
from flashpoint_server.autoscaling import WAITING
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.envelope import Application
from flashpoint_server.ipc.client import Engines, State
from flashpoint_server.observability import logs
from flashpoint_server.processes.parent import raise_descriptor_limit
from flashpoint_server.refusal import Refusal

_SOCKETS = ("host", "port", "insecure", "keep_alive", "header_timeout", "tls_cert", "tls_key", "tls_client_ca")
NOT_HERE = {
    **dict.fromkeys(_SOCKETS, "Ray's proxies own the sockets: see http_options"),
    **dict.fromkeys(("grpc_port", "grpc_bytes", "grpc_ping_interval"), "Ray's proxies forward only HTTP"),
    "workers": "a replica is one process: see num_replicas",
    "replica": "every replica draws its own name",
    "shared_memory_bytes": "a region is registered with one process, and Ray may send a call to another",
}
THE_IMAGES = {"host", "port", "insecure"}  # the container image sets their FLASHPOINT_* variables: these are ignored
READY_SECONDS = 0.05  # seconds between two checks of a starting engine
END_SECONDS = 5.0  # added to the shutdown timeout: time in which the engine and Ray's process can end


class UnstampedId:
    """ASGI middleware that removes X-Request-Id from answers, because Ray's proxy adds this field itself."""

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
    """One Ray Serve replica: the application, and the engine process that it starts for its device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engines: Engines

    def __serve_build_asgi_app__(self) -> Application:
        """Return the application. Ray calls this and then runs its lifespan, which starts and ends the engine."""
        logs.configure(self._settings.log_format, self._settings.log_level)
        raise_descriptor_limit()
        app = create_app(self._settings)
        assert isinstance(app, Application)
        app.add_middleware(UnstampedId)
        app.posts = {path: UnstampedId(route) for path, route in app.posts.items()}
        self._engines = app.state.service.engine
        return app

    async def check_health(self) -> None:
        """Return when the engine is ready. Ray calls this before the first request and every `health_check_period_s`.

        Raises RuntimeError if the engine cannot work here; Ray then starts another replica.
        """
        while self._engines.state is State.STARTING:  # noqa: ASYNC110  # there is no event for a change of state
            await asyncio.sleep(READY_SECONDS)
        device = self._engines.device
        if device is None:
            raise RuntimeError(f"the engine cannot work here: {self._engines.failure}")
        if device.name != "cpu" and not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
            raise RuntimeError(
                f"{device.name} does not belong to this replica: set device=cuda, and Ray gives each replica a GPU"
            )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for the autoscaling policy. Ray calls this."""
        return {WAITING: self._engines.waiting_seconds}


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for `serve run` and for a configuration's `import_path`. `arguments` are settings by name.

    Other settings are FLASHPOINT_* variables or defaults. Raises ValidationError and ValueError, which name the
    setting.
    """
    settings = Settings(**arguments)
    for name in settings.model_fields_set & NOT_HERE.keys() - (THE_IMAGES - arguments.keys()):
        raise ValueError(f"{name}: cannot be set on Ray Serve: {NOT_HERE[name]}")
    if settings.device == "all" or ":" in settings.device:
        raise ValueError(
            f"device: {settings.device} cannot be used on Ray Serve, which gives each replica its device: set cuda"
        )
    return Replica.options(  # type: ignore[attr-defined, no-any-return]
        # Ray admits twice as many requests as the service. So the service refuses requests before Ray does, and
        # health probes are not blocked.
        max_ongoing_requests=2 * settings.queue_limit,
        # In a burst, Ray counts each request as queued until it has chosen a replica for it: the limit must be high.
        max_queued_requests=8 * settings.queue_limit,
        backpressure_config={"retry_after_s": float(Refusal("queue_full", "").headers["Retry-After"])},
        graceful_shutdown_timeout_s=settings.shutdown_timeout + END_SECONDS,
        logging_config={"enable_access_log": False},  # the service writes its own line for each request
        ray_actor_options={"num_gpus": int(settings.device == "cuda")},
    ).bind(settings)
