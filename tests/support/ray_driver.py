"""Run `serve run ARGUMENTS` on a new local Ray cluster, which has no dashboard and ends with this program.

`python ray_driver.py DIRECTORY CPUS GPUS SECONDS ARGUMENTS…`: Ray stores its files in DIRECTORY. The GPUs need not
exist. Ray waits SECONDS for its proxies, because its default is too short for a busy machine.
"""

import signal
import sys

import ray
from ray.serve._private import api, client
from ray.serve.scripts import cli

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    directory, cpus, gpus, seconds, *arguments = sys.argv[1:]
    api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = int(seconds)
    ray.init(
        address="local",  # do not connect to another Ray cluster on this machine
        namespace="serve",
        include_dashboard=False,
        num_cpus=int(cpus),
        num_gpus=int(gpus),
        object_store_memory=128 << 20,  # the service stores nothing there
        _temp_dir=directory,
    )
    cli(["run", *arguments])
