"""An engine whose device fails as its jobs' ids say; no start of the service itself can reach it (see server.py).

gate-…, wait-…  wait until the file of that suffix, otherwise named by FLASHPOINT_TEST_GATE, is there
oom-…, once-…   have no memory, never or the first time        bug-…   fails as nobody foresaw
hang-…          never ends                                     gone-…  the device is lost
unfit-…         nothing can be compiled for it, and nobody foresaw that

At its start it waits for others to leave it memory while the gate .short is there, and finds another device once the
gate .moved is.

And with bugs that callers must see: bugs.py.
"""

import os
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from flashpoint_server import engine_process, serving_engine
from flashpoint_server.device import Device, DeviceLostError, OutOfMemoryError
from flashpoint_server.messages import Channel, Done
from tests.support.faulty.bugs import Seeded

SWAP, LOSE = Seeded("swap"), Seeded("lose")


def gate(which):
    return Path(os.environ.get("FLASHPOINT_TEST_GATE", os.devnull)).with_suffix(f".{which}")


class FaultyDevice(Device):
    def __init__(self, info):
        super().__init__(info)
        self.launches = 1  # also on a GPU: what a gate holds up, all others wait for
        self.seen = set()
        self.last = {}  # answers, by their shapes
        self.compiler = ThreadPoolExecutor(1)
        self.short = []  # of memory: what launches held that had too little

    @classmethod
    def open(cls, asked):
        if gate("short").exists():
            gate("short").rename(gate("left"))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
        return super().open(asked)

    def prove(self):
        super().prove()
        if gate("moved").exists():
            self.info = msgspec.structs.replace(self.info, name="cuda:7")

    def compile(self, job):
        """late-…: the kernels of its launch key are compiled only once the gate .compiled is open."""
        if job.submit.request_id.startswith("unfit-"):
            raise KeyError("what nobody foresaw")
        if not job.submit.request_id.startswith("late-"):
            return super().compile(job)
        return self.compiler.submit(self.wait, "compiled")

    @staticmethod
    def wait(which):
        while not gate(which).exists():
            time.sleep(0.005)

    def empty_cache(self):
        """What a launch had taken is free by now, or there would be no more memory than before."""
        super().empty_cache()
        if any(held() is not None for held in self.short):
            os._exit(3)

    def launch(self, jobs):
        for job in jobs:
            name = job.submit.request_id
            match name.partition("-")[0]:
                case "gate" | "wait" as which:
                    self.wait(which)
                case "oom":
                    self.run_short()
                case "once" if name not in self.seen:
                    self.seen.add(name)
                    self.run_short()
                case "bug":
                    raise KeyError("what nobody foresaw")
                case "hang":
                    time.sleep(3600)
                case "gone":
                    raise DeviceLostError("CUDA error: an illegal memory access was encountered")
        return super().launch(jobs)

    def run_short(self):
        held = torch.empty(1)
        self.short.append(weakref.ref(held))
        raise OutOfMemoryError

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
