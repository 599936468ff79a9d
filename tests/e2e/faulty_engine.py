"""An engine whose device fails as its jobs' ids say; no start of the service itself can reach it (see faulty_server).

gate-…, wait-…  wait until the file of that suffix, otherwise named by FLASHPOINT_TEST_GATE, is there
oom-…, once-…   have no memory, never or the first time        bug-…   fails as nobody foresaw
hang-…          never ends                                     gone-…  the device is lost

And with bugs that callers must see: seeded_bugs.py.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashpoint_server import engine_process, serving_engine
from flashpoint_server.device import Device, DeviceLostError, OutOfMemoryError
from flashpoint_server.messages import Channel, Done
from tests.e2e.seeded_bugs import Seeded

SWAP, LOSE = Seeded("swap"), Seeded("lose")


class FaultyDevice(Device):
    def __init__(self, info):
        super().__init__(info)
        self.launches = 1  # also on a GPU: what a gate holds up, all others wait for
        self.seen = set()
        self.last = {}  # answers, by their shapes
        self.compiler = ThreadPoolExecutor(1)

    def compile(self, job):
        """late-…: the kernels of its launch key are compiled only once the gate .compiled is open."""
        if not job.submit.request_id.startswith("late-"):
            return super().compile(job)
        return self.compiler.submit(self.wait, "compiled")

    @staticmethod
    def wait(which):
        while not Path(os.environ["FLASHPOINT_TEST_GATE"]).with_suffix(f".{which}").exists():
            time.sleep(0.005)

    def launch(self, jobs):
        for job in jobs:
            name = job.submit.request_id
            match name.partition("-")[0]:
                case "gate" | "wait" as which:
                    self.wait(which)
                case "oom":
                    raise OutOfMemoryError
                case "once" if name not in self.seen:
                    self.seen.add(name)
                    raise OutOfMemoryError
                case "bug":
                    raise KeyError("what nobody foresaw")
                case "hang":
                    time.sleep(3600)
                case "gone":
                    raise DeviceLostError("CUDA error: an illegal memory access was encountered")
        return super().launch(jobs)

    def run(self, part, backend):
        super().run(part, backend)
        if SWAP.there():
            shapes = tuple((name, tuple(t.shape)) for name, t in part.outputs.items())
            own = {name: t.clone() for name, t in part.outputs.items()}
            for name, tensor in self.last.get(shapes, {}).items():
                part.outputs[name].copy_(tensor)
            self.last[shapes] = own


class LosingChannel(Channel):
    def send(self, message, descriptors=()):
        if not (isinstance(message, Done) and LOSE.shows()):
            super().send(message, descriptors)


if __name__ == "__main__":
    serving_engine.Channel = LosingChannel
    sys.exit(engine_process.main(FaultyDevice))
