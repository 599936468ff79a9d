"""The kernels on an emulated aarch64 processor give the same bits as the four-lane kernels on this processor."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels import native
from flashpoint_kernels.cpu_backend.backward import differentiate_dense
from flashpoint_kernels.cpu_backend.forward import attend_dense
from flashpoint_kernels.native import build
from flashpoint_kernels.native.calls import Replay
from tests.support.kernels.solving import normal

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason="needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user",
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aarch64") / "replay"
    sources = [str(build.HERE / f"{name}.c") for name in (*build.KERNELS, "threads")]
    main = str(Path(__file__).parent / "replay_main.c")
    flags = [*build.FLAGS, "-Werror", "-DISA=generic", "-static", "-pthread"]
    ran = subprocess.run([COMPILER, *flags, main, *sources, "-o", str(made), "-lm"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return made


def emulate(program: Path, backward: bool, replay: Replay, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run the calls of `replay` on the emulator, and return `tensors` as they are afterwards."""
    memory = [t.view(torch.uint8).numpy().tobytes() for t in tensors]
    head = [backward, replay.size, replay.count, len(replay.integers), *replay.integers, *replay.bases, len(memory)]
    given = np.array([*head, *map(len, memory)], np.int64).tobytes() + b"".join(memory)
    ran = subprocess.run([EMULATOR, str(program)], input=given, capture_output=True, check=True)
    pieces = torch.frombuffer(bytearray(ran.stdout), dtype=torch.uint8).split([len(one) for one in memory])
    return [piece.clone().view(t.dtype).view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "dim", "options"),
    [
        (torch.float32, 64, Options(causal=True)),
        (torch.bfloat16, 40, Options(softcap=3.0)),
        (torch.float16, 80, Options(window=(50, 3))),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_it_has_the_bits_of_lanes_of_four(
    program: Path,
    lanes_of_four: native.Library,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    dim: int,
    options: Options,
) -> None:
    monkeypatch.setattr(native, "library", lambda: lanes_of_four)
    q, do = (normal(2, 4, 70, dim, seed=n).to(dtype) for n in range(2))
    k, v = (normal(2, 2, 150, dim, seed=n).to(dtype) for n in range(2, 4))
    name = str(dtype).removeprefix("torch.")
    infos = {n: TensorInfo(name, tuple(t.shape)) for n, t in {"q": q, "k": k, "v": v}.items()}
    spec: Spec = plan(infos, options, "forward")
    tensors = [q, k, v, torch.empty_like(q), torch.empty(2, 4, 70)]
    replay = attend_dense(spec, spec.rows({})[0], *tensors, threads=2)
    assert replay is not None
    o, lse = tensors[3:]
    for actual, expected in zip(emulate(program, False, replay, [q, k, v, o * 0, lse * 0])[3:], (o, lse), strict=True):
        assert torch.equal(actual, expected)
    infos |= {"do": TensorInfo(name, tuple(o.shape)), "o": TensorInfo(name, tuple(o.shape))}
    infos |= {"lse": TensorInfo("float32", tuple(lse.shape))}
    given = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse}
    gradients = {f"d{n}": torch.zeros_like(given[n]) for n in "qkv"}
    replay = differentiate_dense(plan(infos, options, "backward"), given | gradients, threads=2)
    assert replay is not None
    again = emulate(program, True, replay, [*given.values(), *(t * 0 for t in gradients.values())])[6:]
    for actual, expected in zip(again, gradients.values(), strict=True):
        assert torch.equal(actual, expected)
