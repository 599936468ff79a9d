"""`ahead` finds the kernels that Triton's cache lacks, and compiles them without a launch, for an absent GPU.

The tests run processes that pretend to have an sm_90 (`ahead.pretend`), without Triton's interpreter.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime import cache

from flashpoint_kernels import Options, Problem, triton_backend
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from flashpoint_kernels.triton_backend.tools import ahead

PROBLEM = """
import torch
from flashpoint_kernels import Options, Problem, triton_backend
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.tools import ahead

ahead.pretend(90)

def problem(direction, keys=2000, **options):
    shapes = {"q": (1, 2, 9, 16), "k": (1, 1, keys, 16), "v": (1, 1, keys, 16), "do": (1, 2, 9, 16)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if direction == "forward":
        del tensors["do"]
    return Problem.create(tensors, Options(**options), direction)

"""
FORWARD = """
forward = problem("forward", keys=9)
assert not triton_backend.compiled([forward])
triton_backend.compile_ahead([forward]).result()
assert triton_backend.compiled([forward])
assert not triton_backend.compiled([problem("forward", keys=9, window=(5, 5))]), "another variant"
"""
SCRIPT = """
forward, window = problem("forward"), problem("forward", window=(5, 5))
assert not triton_backend.compiled([forward])
triton_backend.compile_ahead([forward]).result()
assert triton_backend.compiled([forward]) and triton_backend.compiled([forward, problem("forward", causal=True)])
assert not triton_backend.compiled([window]), "another variant"
gradient = problem("backward")
assert not triton_backend.compiled([gradient])
triton_backend.compile_ahead([gradient]).result()
assert triton_backend.compiled([gradient])
single = problem("forward", keys=9, softcap=1.0)
triton_backend.compile_ahead([single]).result()
assert triton_backend.compiled([problem("forward", softcap=1.0)]), "whose many keys are split: of the same launch key"
pages = {"q": (3, 2, 1, 16), "k": (130, 1, 16, 16), "v": (130, 1, 16, 16)}
pages = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in pages.items()}
pages |= {"block_table": torch.arange(130, dtype=torch.int32).repeat(3, 1), "kv_lengths": torch.tensor([2080] * 3)}
own, forks = (Problem.create(pages, Options(), fixed_pages=fixed) for fixed in (False, True))
triton_backend.compile_ahead([own]).result()
assert triton_backend.compiled([own, forks]), "whose pages are shared: of the same launch key"
calls = [call.kernel.__name__ for call in launch.forward_calls([forks]) if call.programs]
assert calls == ["attention_cascade", "attention_forward", "merge_parts"]
"""


FULL = """
import errno, resource

forward = problem("forward", keys=9)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # no file takes a byte, as on a full disk
try:
    triton_backend.compile_ahead([forward]).result()
except OSError as error:
    assert error.errno == errno.EFBIG
else:
    raise AssertionError("nothing was written")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
triton_backend.compile_ahead([forward]).result()
assert triton_backend.compiled([forward])
"""


def test_interpreted_kernels_are_always_compiled() -> None:
    q = torch.zeros(1, 1, 4, 16)
    problem = Problem.create({"q": q, "k": q, "v": q}, Options())
    assert triton_backend.compiled([problem])
    assert triton_backend.compile_ahead([problem]).result() is None


@pytest.mark.slow
def test_what_was_compiled_ahead_is_known_to_be_compiled(tmp_path: Path) -> None:
    assert {path.stem for path in compiled(tmp_path, "-c", PROBLEM + FORWARD)} >= {"attention_forward"}


@pytest.mark.slow
def test_a_full_disk_fails_what_is_compiled_until_there_is_room(tmp_path: Path) -> None:
    """A compilation that failed on a full disk runs again at the next call. Kernels on a full disk can still be loaded.

    See docs/runbooks.md, "A full disk".
    """
    assert {path.stem for path in compiled(tmp_path, "-c", PROBLEM + FULL)} >= {"attention_forward"}
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    known = FORWARD.replace("assert not triton_backend.compiled([forward])", limited)
    assert compiled(tmp_path, "-c", PROBLEM + known), "a kernel in the folder is loaded from a full disk, too"


@pytest.mark.full  # not slow: the slow tests before and after this one cover a forward and a gradient
def test_a_variant_is_compiled_ahead_into_the_cache_that_processes_share(tmp_path: Path) -> None:
    made = [compiled(tmp_path, "-c", PROBLEM + SCRIPT, FLASHPOINT_HOPPER="1") for _ in range(2)]
    kernels = {path.stem for path in made[0]}
    # The 2000 keys of nine queries are split, so the general kernels compute them, not those for Hopper.
    # `gradient` has no sinks, but problems with the same launch key may have sinks, so their kernel is compiled, too.
    assert kernels == {
        "attention_forward", "attention_cascade", "merge_parts", "attention_delta", "attention_backward_kv",
        "attention_backward_q", "attention_backward_sinks",
    }  # fmt: skip
    assert made[0] == made[1], "the second process compiled again"


@pytest.mark.slow
def test_what_an_image_has_compiled_a_server_on_that_gpu_does_not_compile_again(tmp_path: Path) -> None:
    """A server compiles no kernel that its Docker image has, whatever the lengths, batches and head counts.

    An image has kernels for several architectures, and only two files of each kernel: .cubin and .json.
    """
    module = "flashpoint_kernels.triton_backend.tools.ahead"
    arguments = ("--arch", "80", "90", "--dtypes", "bfloat16", "--head-dims", "16", "--levels", "0", "--processes", "1")
    before = compiled(tmp_path, "-m", module, *arguments)
    names: dict[int, set[str]] = {80: set(), 90: set()}
    for path in before:
        names[json.loads(path.with_suffix(".json").read_text())["target"]["arch"]].add(path.stem)
    products = {"attention_forward", "attention_backward_kv", "attention_backward_q"}
    assert names[80] >= products
    assert names[90] == names[80] | {f"{name}_hopper" for name in products}
    for path in tmp_path.rglob("*.*"):
        if path.suffix not in (".cubin", ".json"):
            path.unlink()
    assert compiled(tmp_path, "-c", WARM) == before


def test_a_process_compiles_for_one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "stand_in", config.Chip(80, SHARED_KIB[80]))
    with pytest.raises(RuntimeError, match="this process compiles for sm_80: compile for sm_90 in another"):
        ahead.pretend(90)


def test_keys_are_those_of_another_library_of_the_same_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with another Python has another library: a cache that is compiled for it has its keys."""
    own = Path(triton.__path__[0], "_C", "libtriton.so")
    other = tmp_path / "libtriton.so"
    other.write_bytes(b"of another Python")
    before = cache.triton_key()
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # restores it
    ahead.use_keys_of(own)
    assert cache.triton_key() == before
    ahead.use_keys_of(other)
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (own, other)]
    assert before.split(hashes[0]) == cache.triton_key().split(hashes[1])
    assert hashes[0] in before


WARM = """
import torch
from flashpoint_kernels import Options, Problem, triton_backend
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.tools import ahead

ahead.pretend(90)
for batch, heads, length in ((1, 1, 16), (2, 4, 333), (3, 8, 4096)):
    q = torch.zeros(batch, heads, length, 16, dtype=torch.bfloat16)
    for names, direction in (("qkv", "forward"), (("q", "k", "v", "do"), "backward")):
        problem = Problem.create(dict.fromkeys(names, q), Options(causal=length > 16), direction)
        triton_backend.compile_ahead([problem]).result()
"""


def compiled(cache: Path, *arguments: str, **variables: str) -> dict[Path, int]:
    """Run Python with Triton's cache in `cache`; return {kernel file: time of writing} of the cache afterwards."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), **variables}
    run = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
