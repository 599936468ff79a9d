"""An engine that fails or waits, depending on how the id of a request begins. Only tests start it (see server.py).

gate-…, wait-…  the launch waits until the gate `gate` (or `wait`) opens
oom-…, once-…   out of memory, always or the first time     bug-…   an unexpected exception
hang-…          the launch never ends                       gone-…  the device is lost
loud-…          logs more lines than the log's queue holds
unfit-…         an unexpected exception while its kernels are compiled
late-…          its kernels are compiled only after the gate `compiled` opens
step-…          its second part waits, and no further part begins, until the gate `step` opens; a verification waits
                before its third block

A request of the backend `reference` is one launch; one of `torch` or `tiled` is cut into parts. Launches run one at a
time.

A gate is a file next to FLASHPOINT_TEST_GATE with the gate's name as suffix; it is open while the file exists. At its
start the engine waits while `.closed` exists, finds too little memory once if `.short` exists, and finds another device
if `.moved` exists.

It logs `queued` for a request that enters its queue, `part` for each part that it begins, `block` for each block of a
verification, `held` for a part or block that waits, `dropped` for a request that leaves the queue, and `stopped` for a
verification that it must end. It predicts durations from fixed rates. On the CPU it does not check its backends at the
start, which takes 3 s under Triton's interpreter: tests that start the service's engine cover this check.

It also has bugs on demand (bugs.py). FLASHPOINT_TEST_HELD replaces the seconds for which a verification holds a copy.
"""

import os
import sys
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import msgspec
import structlog
import torch

from flashpoint_kernels.cpu_backend.spans import Part
from flashpoint_kernels.problems.cost import NOMINAL
from flashpoint_server.engine import loop, process, self_test
from flashpoint_server.engine.caches import store
from flashpoint_server.engine.execution import executor
from flashpoint_server.engine.execution.cpu import CpuDevice
from flashpoint_server.engine.execution.cuda import CudaDevice
from flashpoint_server.engine.execution.device import DeviceLostError
from flashpoint_server.engine.scheduling import engine_request, scheduler
from flashpoint_server.engine.scheduling.engine_request import OutOfMemoryError
from flashpoint_server.engine.scheduling.tasks import Compute
from flashpoint_server.engine.state import ledger
from flashpoint_server.engine.state.memory import tensor_in
from flashpoint_server.engine.verifying import verifier
from flashpoint_server.ipc.messages import Done
from flashpoint_server.observability.lines import ROOM
from tests.support.faulty.bugs import Seeded

SWAP, LOSE, TWICE, HOARD = Seeded("swap"), Seeded("lose"), Seeded("twice"), Seeded("hoard")
WRONG = Seeded("wrong")

log = structlog.stdlib.get_logger("flashpoint.engine")


def gate(which):
    return Path(os.environ.get("FLASHPOINT_TEST_GATE", os.devnull)).with_suffix(f".{which}")


class Faulty:
    def __init__(self, info):
        super().__init__(info)
        self.launches = 1  # one launch at a time, even on a GPU: while it waits at a gate, all other launches wait
        self.lanes = max(self.lanes, 2)  # two threads, even on one core: one takes requests while a launch waits
        self.seen = set()
        self.last = {}  # the last answer of each shape
        self.compiler = ThreadPoolExecutor(1)
        self.short = []  # weak references to tensors of launches that ran out of memory

    @classmethod
    def open(cls, *asked):
        while gate("closed").exists():
            time.sleep(0.005)
        if gate("short").exists():
            gate("short").rename(gate("left"))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
        return super().open(*asked)

    def cuts(self, backend):
        return super().cuts(backend) and backend != "reference"

    def compile(self, job):
        if job.submit.request_id.startswith("unfit-"):
            raise KeyError("an unexpected error")
        if not job.submit.request_id.startswith("late-"):
            return super().compile(job)
        return self.compiler.submit(self.wait, "compiled")

    @staticmethod
    def wait(which):
        while not gate(which).exists():
            time.sleep(0.005)

    def empty_cache(self):
        """Check that the engine has released the tensors of launches that ran out of memory."""
        super().empty_cache()
        if any(reference() is not None for reference in self.short):
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
                    raise KeyError("an unexpected error")
                case "hang":
                    time.sleep(3600)
                case "gone":
                    raise DeviceLostError("CUDA error: an illegal memory access was encountered")
        return super().launch(jobs)

    def run_short(self):
        tensor = torch.empty(1)
        self.short.append(weakref.ref(tensor))
        raise OutOfMemoryError

    def verify(self, job, progress):
        name = job.submit.request_id

        def block(at):
            progress(at)
            log.debug("block", request_id=name, number=at.done)
            if name.startswith("step-") and at.done == 2:
                log.debug("held", request_id=name)
                self.wait("step")

        return super().verify(job, block)

    def run(self, part, backend):
        super().run(part, backend)
        if SWAP.there() and not isinstance(part, Part):
            shapes = tuple((name, tuple(t.shape)) for name, t in part.outputs.items())
            outputs = {name: t.clone() for name, t in part.outputs.items()}
            for name, tensor in self.last.get(shapes, {}).items():
                part.outputs[name].copy_(tensor)
            self.last[shapes] = outputs


class FaultyCpu(Faulty, CpuDevice):
    pass


class FaultyGpu(Faulty, CudaDevice):
    pass


def start(asked):
    """Open and return a device that predicts durations from fixed rates. On the CPU, do not check its backends."""
    device = self_test.open_device(asked, FaultyCpu, FaultyGpu)
    if isinstance(device, FaultyGpu):
        self_test.check_backends(device)
    name = "cuda:7" if gate("moved").exists() else device.info.name
    rates = {backend: NOMINAL[backend] for backend in device.info.backends}
    device.info = msgspec.structs.replace(device.info, name=name, rates=rates)
    return device


class TellingExecutor(executor.Executor):
    parts: ClassVar = Counter()  # started parts, by the name of their request

    def run(self, task):
        if isinstance(task, Compute):
            self.tell(task.requests[0].submit.request_id)
        return super().run(task)

    def answer(self, request, *about):
        for t in request.outputs if request.failure is None and WRONG.there() else ():
            if t.name != "lse":
                tensor_in(request.memory, t).mul_(1.25)
        super().answer(request, *about)

    def tell(self, name):
        self.parts[name] += 1
        number = self.parts[name]
        log.debug("part", request_id=name, number=number)
        if name.startswith("loud-"):
            for _ in range(2 * ROOM // 1000):
                log.error("loud", request_id=name, text="x" * 1000)
        if name.startswith("step-") and number == 2:
            log.debug("held", request_id=name)
            Faulty.wait("step")


class TellingScheduler(scheduler.Scheduler):
    taken: ClassVar = Counter()  # for each request id, the number of parts that a thread has started or will start next

    def admit(self, request):
        super().admit(request)
        log.debug("queued", request_id=request.submit.request_id)

    def cancel(self, worker, number):
        super().cancel(worker, number)
        for request in self._stoppable:
            if request.worker is worker and request.submit.id == number:
                log.debug("stopped", request_id=request.submit.request_id)

    def take(self):
        return self._counted(super().take())

    def finish(self, task, failure):
        return self._counted(super().finish(task, failure))

    def _counted(self, task):
        if isinstance(task, Compute):
            self.taken[task.requests[0].submit.request_id] += 1
        return task

    def _has_lane(self, item):
        name = item.submit.request_id
        at_gate = name.startswith("step-") and self.taken[name] >= 2 and not gate("step").exists()
        return not at_gate and super()._has_lane(item)

    def _remove(self, unwanted):
        removed = super()._remove(unwanted)
        for request in removed:
            log.debug("dropped", request_id=request.submit.request_id)
        return removed

    def _drop_parts(self, first):
        if first.parts:
            for request in (first, *first.others):
                log.debug("dropped", request_id=request.submit.request_id)
        super()._drop_parts(first)


class FaultyStore(store.CacheStore):
    def _repeats(self, terms, caches):
        return False if TWICE.there() else super()._repeats(terms, caches)


class FaultyLedger(ledger.Ledger):
    def end(self, item):
        if HOARD.there():
            item.free = lambda: 0
        super().end(item)


class LosingWorker(engine_request.Worker):
    def send(self, reply):
        if not (isinstance(reply, Done) and LOSE.shows()):
            super().send(reply)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.kernels import fast_interpreter  # here, since it imports triton

        fast_interpreter.install()
    verifier.HELD_SECONDS = float(os.environ.get("FLASHPOINT_TEST_HELD", verifier.HELD_SECONDS))
    loop.Worker = LosingWorker
    executor.TOLD_SECONDS = 0.0  # report the progress of a verification after each block
    executor.Executor = TellingExecutor
    scheduler.Scheduler = TellingScheduler
    store.CacheStore = FaultyStore
    ledger.Ledger = FaultyLedger
    sys.exit(process.main(start))
