"""One of several HTTP processes: `python -m flashpoint_server.cli.worker --listener FD --engines HEX,… …`.

Its settings are FLASHPOINT_* variables, which the supervisor sets from its own settings.
"""

from __future__ import annotations

import argparse
import socket
import sys

from flashpoint_server.app import create_app
from flashpoint_server.cli.hangup import HANGUP
from flashpoint_server.cli.serving import serve_on
from flashpoint_server.config.files import HandedFiles
from flashpoint_server.config.settings import GivenSettings
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.observability import logs
from flashpoint_server.processes.parent import CANNOT_WORK, die_with_parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--files", type=int, required=True, help="descriptor of the keys and certificates")
    parser.add_argument("--engines", required=True, help="addresses of the engines, in hexadecimal")
    parser.add_argument("--number", type=int, required=True, help="number of this HTTP process")
    parser.add_argument("--memory", type=int, required=True, help="descriptor of the memory that the processes share")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    HANGUP.catch()
    settings = GivenSettings()
    logs.configure(settings.log_format, settings.log_level)
    engines = [bytes.fromhex(address) for address in arguments.engines.split(",")]
    shared = WorkerGroup(NamedMemory(arguments.memory), arguments.number, settings.workers)
    files = HandedFiles(settings, arguments.files)
    app = create_app(settings, engines, shared=shared, files=files)
    ended = serve_on(socket.socket(fileno=arguments.listener), app)
    return CANNOT_WORK if app.state.service.engine.failure else ended


if __name__ == "__main__":
    sys.exit(main())
