"""What is not compiled yet is known, and compiled aside, by Triton's own path up to the launch, for an absent GPU.

In a process without the interpreter. Triton's driver is what there is no GPU for: here it says that there is an sm_90.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from flashpoint_kernels import Options, Problem, triton_backend

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Driver())
from flashpoint_kernels import Options, Problem, triton_backend
from flashpoint_kernels.triton_backend import config
config.chip_of = lambda device: config.Chip(90, 227)

def problem(direction, **options):
    shapes = {"q": (1, 2, 9, 16), "k": (1, 1, 2000, 16), "v": (1, 1, 2000, 16), "do": (1, 2, 9, 16)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if direction == "forward":
        del tensors["do"]
    return Problem.create(tensors, Options(**options), direction)

forward, window = problem("forward"), problem("forward", window=(5, 5))
assert not triton_backend.compiled([forward])
triton_backend.compile_ahead([forward]).result()
assert triton_backend.compiled([forward]) and triton_backend.compiled([forward, problem("forward", causal=True)])
assert not triton_backend.compiled([window]), "another variant"
gradient = problem("backward")
assert not triton_backend.compiled([gradient])
triton_backend.compile_ahead([gradient]).result()
assert triton_backend.compiled([gradient])
"""


def test_interpreted_kernels_are_always_compiled() -> None:
    q = torch.zeros(1, 1, 4, 16)
    problem = Problem.create({"q": q, "k": q, "v": q}, Options())
    assert triton_backend.compiled([problem])
    assert triton_backend.compile_ahead([problem]).result() is None


def test_a_variant_is_compiled_ahead_into_the_cache_that_processes_share(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "FLASHPOINT_HOPPER": "1"}
    made = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")})
    kernels = {path.stem for path in made[0]}
    # Nine queries of 2000 keys are split, and so go through pointers, their gradient's forward too.
    assert kernels == {
        "attention_forward", "merge_parts", "attention_delta", "attention_backward_kv", "attention_backward_q",
    }  # fmt: skip
    assert made[0] == made[1], "the second process compiled again"
