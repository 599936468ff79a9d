"""The service refuses work until an engine is ready and while it drains. `drain` waits for admitted work."""

import asyncio

import pytest

from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.client import Engine, State
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.refusal import Refusal
from flashpoint_server.service import Service

DEVICE = DeviceInfo("cpu", "a processor", 1 << 30, ("cpu",), 1e9)


def ready(engine):
    engine.device = DEVICE
    engine.become(State.READY)


def with_engine(settings):
    """Return a service whose engine counts as ready, although no engine process runs."""
    service = Service(settings, WorkerGroup())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "connect", ready)
        service.engine.connect([b"none"])
    return service


def code(call):
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.status == 503
    return caught.value.code


def test_work_is_refused_until_an_engine_is_ready():
    async def run():
        service = Service(Settings(), WorkerGroup())
        assert not service.ready
        assert code(service.begin) == "not_ready"
        assert await service.drain()  # draining does not wait for the refused request
        assert code(service.begin) == "draining"
        service.close()

    asyncio.run(run())


@pytest.mark.parametrize("ends", [True, False])
def test_a_drain_waits_for_the_work_that_has_begun(ends):
    async def run():
        service = with_engine(Settings(shutdown_timeout=60 if ends else 0.01))
        assert service.begin() == service.begin() == DEVICE
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert code(service.begin) == "draining"
        service.end()
        await asyncio.sleep(0)
        assert not draining.done()
        if ends:
            service.end()
        assert await draining is ends
        service.close()

    asyncio.run(run())
