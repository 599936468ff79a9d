"""`serve run ARGUMENTS` on a Ray of its own in DIRECTORY, which ends with it: small, and with no dashboard.

`python ray_driver.py DIRECTORY CPUS GPUS SECONDS ARGUMENTS…`: Ray is told of so many GPUs, which need not exist, and
waits for its proxies for so long, where its own constant is too short for a busy machine.
"""

import signal
import sys

import ray
from ray.serve._private import api, client
from ray.serve.scripts import cli

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    directory, cpus, gpus, seconds, *arguments = sys.argv[1:]
    api.HTTP_PROXY_TIMEOUT = client.HTTP_PROXY_TIMEOUT = int(seconds)
    ray.init(
        address="local",  # not another Ray that runs on this machine
        namespace="serve",
        include_dashboard=False,
        num_cpus=int(cpus),
        num_gpus=int(gpus),
        object_store_memory=128 << 20,  # we keep nothing there
        _temp_dir=directory,
    )
    cli(["run", *arguments])
