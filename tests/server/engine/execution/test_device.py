"""A device reads and writes shared memory, and classifies errors."""

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import numpy as np
import psutil
import torch

from flashpoint_contract.options import Options
from flashpoint_server.engine.benchmarks import local
from flashpoint_server.engine.execution.cpu import CpuDevice
from flashpoint_server.engine.execution.cuda import CudaDevice
from flashpoint_server.engine.execution.device import NO_COPIES, DeviceLostError
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, OutOfMemoryError, Worker
from flashpoint_server.engine.self_test import open_device
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor, PlannedCall, encode
from flashpoint_server.ipc.messages import DeviceInfo, Submit
from flashpoint_server.refusal import Refusal
from tests.support.messages import message, post, problem, small


@pytest.fixture(scope="module")
def device():
    return CpuDevice.open()


ROOT = Path(__file__).parents[4]


def submit(inputs, outputs, room=1 << 16, **options):
    """Return an engine request for a forward whose inputs and outputs are in shared memory, aligned to 64 bytes."""
    memory = mmap.mmap(-1, room)
    placed, at = [], 0
    for name, array in inputs.items():
        memory[at : at + array.nbytes] = array.tobytes()
        placed.append(PlacedTensor(name, array.dtype.name, array.shape, SLOT, at))
        at += -(-array.nbytes // 64) * 64
    made = []
    for name, shape in outputs.items():
        made.append(PlacedTensor(name, "float32", shape, SLOT, at))
        at += 4 * int(np.prod(shape))
    body = encode(PlannedCall("forward", Options(**options), "tiled", tuple(placed), tuple(made)))
    job = Submit(
        id=0, request_id="an-id", body=body, segment=0, start=0, mark=0, flops=0, seconds=0.0, rank=0.0
    )  # fmt: skip
    return EngineRequest.of(job, Worker(channel=None, pinning=None, segments={0: memory}), lambda _: True)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="device cuda:3 is not available: torch finds no CUDA device"):
        open_device("cuda:3")


def test_answers_are_written_where_they_are_wanted(device):
    q = np.random.default_rng(0).standard_normal((1, 2, 3, 8), np.float32)
    job = submit({"q": q, "k": q, "v": q}, {"o": q.shape, "lse": q.shape[:3]}, return_lse=True)
    assert device.launch([job]) == ([None], NO_COPIES)
    o, lse = (
        np.frombuffer(job.memory.segments[0], np.float32, int(np.prod(t.shape)), t.offset).reshape(t.shape)
        for t in job.outputs
    )
    scores = torch.from_numpy(q @ q.swapaxes(-1, -2)).double() / 8**0.5
    np.testing.assert_allclose(o, torch.softmax(scores, -1).numpy() @ q, atol=1e-6)
    np.testing.assert_allclose(lse, torch.logsumexp(scores, -1).numpy(), atol=1e-6)


def test_every_byte_of_a_bool_but_0_is_true(device):
    """Each byte of a bool tensor except 0 counts as true. In compiled code, bytes over 1 are undefined behaviour."""
    q, v = np.zeros((1, 8), np.float32), np.arange(32, dtype=np.float32).reshape(4, 8)
    mask = np.array([[0, 1, 2, 255]], np.uint8).view(bool)
    job = submit({"q": q, "k": np.zeros_like(v), "v": v, "attn_mask": mask}, {"o": (1, 8)})
    device.launch([job])
    (o,) = job.outputs
    np.testing.assert_allclose(np.frombuffer(job.memory.segments[0], np.float32, 8, o.offset), v[1:].mean(0), rtol=1e-6)


def test_index_tensors_that_do_not_fit_are_422(device):
    q = np.zeros((2, 1, 3, 8), np.float32)
    job = submit({"q": q, "k": q, "v": q, "kv_lengths": np.array([1, 4])}, {"o": q.shape})
    with pytest.raises(Refusal) as caught:
        device.rows(job)
    assert caught.value.status == 422
    assert [field for field, _ in caught.value.errors] == ["kv_lengths"]


class Gpu(CudaDevice):
    """A device that classifies errors as on a GPU. `works`: the result of the check whether CUDA still works."""

    def __init__(self, works):
        super().__init__(DeviceInfo("cuda:0", "none", 0, ("triton",), 1.0))
        self.works = works

    def lost(self):
        return not self.works


@pytest.mark.parametrize(
    ("error_text", "works", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered", False, DeviceLostError),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False, DeviceLostError),
        ("CUDA error: invalid configuration argument", True, RuntimeError),
        ("CUDA error: out of memory", True, OutOfMemoryError),
        ("Triton Error [CUDA]: out of memory", True, OutOfMemoryError),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True, OutOfMemoryError),
        ("mat1 and mat2 shapes cannot be multiplied", False, RuntimeError),
    ],
)
def test_a_device_is_lost_only_where_nothing_works_any_more(error_text, works, kind, device, monkeypatch):
    """After a CUDA error, the device counts as lost only if a check fails: one bad call may have the same text."""

    def fail(*_):
        raise RuntimeError(error_text)

    monkeypatch.setattr("flashpoint_server.engine.execution.device.run_part", fail)
    with pytest.raises((RuntimeError, DeviceLostError, OutOfMemoryError)) as caught:
        Gpu(works).run(None, "triton")
    assert caught.type is kind


COMPILE = """
import numpy as np
from tests.server.engine.execution.test_device import submit
from flashpoint_kernels.triton_backend.tools import ahead
from flashpoint_server.engine.execution.cuda import CudaDevice
from flashpoint_server.ipc.messages import DeviceInfo

ahead.pretend(90)
device = CudaDevice(DeviceInfo("cpu", "an sm_90 for who compiles", 0, ("triton",), 1.0))
shapes = {"q": (1, 2, 9, 16), "k": (1, 1, 9, 16), "v": (1, 1, 9, 16)}
tensors = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
job = submit(tensors, {"o": shapes["q"]}, room=1 << 20)
job.worker.segments.clear()
found = device.compile(job)
assert found is not None
found.result()
assert device.compile(job) is None
"""


@pytest.mark.slow
def test_kernels_are_compiled_for_a_job_whose_tensors_nobody_reads(tmp_path):
    """`compile` does not read the tensors of a request, so a request that waits for its kernels uses no GPU memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    subprocess.run(command, check=True, cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)})


def test_a_cuda_build_of_torch_that_finds_no_gpu_says_so(monkeypatch):
    """With `--device auto`, a CUDA build of torch that finds no GPU causes a message; with `cpu` it causes none.

    tests/docker/test_gpu_image.py tests this with a real CUDA build.
    """
    assert open_device("auto").info.no_gpu == ""  # this torch is built for the CPU, or has a GPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = open_device("auto").info.no_gpu
    assert reason.startswith("torch is built for CUDA 13.0 but finds no GPU, so the CPU computes")
    assert reason in local.info()["missing"]
    assert open_device("cpu").info.no_gpu == ""


GOOD = small()


def test_out_of_memory_is_503_for_the_culprit_alone(server):
    engine = server.engine_pid
    room = psutil.Process(engine).memory_info().vms + (64 << 20)
    before = resource.prlimit(engine, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    big = {name: torch.zeros(1, 8, 4096, 8) for name in ("q", "k", "v", "do")}  # 215 MiB of scores in float64
    try:
        answer = post(server, "/attention/grad", message(big, backend="reference"))
    finally:
        resource.prlimit(engine, resource.RLIMIT_AS, before)
    problem(answer, 503, "out_of_memory")
    assert int(answer.headers["retry-after"]) >= 1
    assert post(server, "/attention", GOOD).status == 200
    assert server.get("/health/ready")[0] == 200
