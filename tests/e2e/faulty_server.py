"""The service with engines that fail on demand (faulty_engine.py), and with bugs on demand (seeded_bugs.py)."""

import sys

from flashpoint_server import Settings, compute, create_app, logs, serving
from flashpoint_server.staging import Staging
from tests.e2e.seeded_bugs import Seeded

LEAK = Seeded("leak")


class LeakingStaging(Staging):
    def release(self):
        if not LEAK.shows():
            super().release()


if __name__ == "__main__":
    compute.Staging = LeakingStaging
    settings = Settings(_cli_parse_args=sys.argv[1:])
    logs.configure(settings.log_format, settings.log_level)
    app = create_app(settings, engine_module="tests.e2e.faulty_engine")
    sys.exit(serving.serve_on(serving.listen(settings), app))
