"""Where metrics are counted. Imported before prometheus_client, which reads the environment at its import."""

import os
import sys

# If one of these variables names a folder, prometheus_client counts in files there. A folder from the environment of
# another program may have the counts of processes that have ended, and no file can grow on a full disk. So HTTP
# processes count in memory (observability/shared.py). Where a program has imported prometheus_client before, its choice
# stays.
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
if "prometheus_client" not in sys.modules:
    for _name in (MULTIPROCESS, MULTIPROCESS.lower()):
        os.environ.pop(_name, None)
