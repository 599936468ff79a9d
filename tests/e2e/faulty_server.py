"""The service with engines that fail on demand: faulty_engine.py."""

import sys

from flashpoint_server import Settings, create_app, logs, serving

if __name__ == "__main__":
    settings = Settings(_cli_parse_args=sys.argv[1:])
    logs.configure(settings.log_format, settings.log_level)
    app = create_app(settings, engine_module="tests.e2e.faulty_engine")
    sys.exit(serving.serve_on(serving.listen(settings), app))
