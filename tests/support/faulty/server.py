"""The service with engines that fail on demand (tests/support/faulty/engine.py), and with bugs on demand (bugs.py)."""

import sys

from flashpoint_server import create_app
from flashpoint_server.cli import ports, serving
from flashpoint_server.config.sources import load
from flashpoint_server.ipc.job import Job
from flashpoint_server.observability import logs
from flashpoint_server.routes import pipeline
from tests.support.faulty.bugs import Seeded

LEAK = Seeded("leak")


class LeakingJob(Job):
    def release(self):
        if not LEAK.shows():
            super().release()


def fail():
    raise KeyError("an unexpected error")


def typed(number: int):
    return number


if __name__ == "__main__":
    pipeline.Job = LeakingJob
    flags = (argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    settings = load({name.replace("-", "_"): value for name, value in flags}).settings
    logs.configure(settings.log_format, settings.log_level)
    app = create_app(settings, engine_module="tests.support.faulty.engine")
    app.add_api_route("/fail", fail)
    app.add_api_route("/typed", typed)
    sys.exit(serving.serve_on(ports.listen(settings), app))
