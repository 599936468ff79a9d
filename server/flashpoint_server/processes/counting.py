"""The folder of the metrics' files. Imported before prometheus_client, which reads the environment at its import."""

import os
import sys

# If one of these variables names a folder, prometheus_client counts in files there. A folder from the environment of
# another program may have the counts of processes that have ended. So only the supervisor names one, in FOLDER, to its
# HTTP processes. Where a program has imported prometheus_client before, its choice stays.
FOLDER = "_FLASHPOINT_METRICS"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
if "prometheus_client" not in sys.modules:
    for _name in (MULTIPROCESS, MULTIPROCESS.lower()):
        os.environ.pop(_name, None)
    if (_folder := os.environ.pop(FOLDER, None)) is not None:
        os.environ[MULTIPROCESS] = _folder
