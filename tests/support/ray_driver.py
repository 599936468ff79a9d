"""`serve run ARGUMENTS` on a Ray of its own in DIRECTORY, which ends with it: small, and with no dashboard.

`python ray_driver.py DIRECTORY CPUS GPUS ARGUMENTS…`; a GPU that is said to be there need not be.
"""

import signal
import sys

import ray
from ray.serve.scripts import cli

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs begin without
    directory, cpus, gpus, *arguments = sys.argv[1:]
    ray.init(
        address="local",  # and no other that runs here
        namespace="serve",
        include_dashboard=False,
        num_cpus=int(cpus),
        num_gpus=int(gpus),
        object_store_memory=128 << 20,  # nothing of ours is kept there
        _temp_dir=directory,
    )
    cli(["run", *arguments])
