"""The threads of the kernels in C compute each call once, for any caller; C and Python agree on a call's layout."""

import ctypes
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import attention
from flashpoint_kernels.native import backward, build, calls, forward
from tests.support.kernels.solving import normal

COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Number(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


def numbers(count: int) -> list[Number]:
    return [Number(n) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 256, 300])
def test_each_call_is_computed_once(count: int) -> None:
    seen: Counter[int] = Counter()

    @COMPUTE
    def compute(call: int) -> int:
        seen[Number.from_address(call).value] += 1
        return 0

    for turn in range(1, 5):
        calls.share(compute, numbers(count))
        assert seen == dict.fromkeys(range(count), turn)


def test_calls_run_on_threads_of_their_own_which_take_no_signals() -> None:
    """Two calls that wait for each other both return, so they run on two threads; the second thread blocks signals."""
    barrier, blocked = threading.Barrier(2), {}

    @COMPUTE
    def compute(call: int) -> int:
        barrier.wait(60)
        status = Path("/proc/thread-self/status").read_text()
        blocked[Number.from_address(call).value] = next(s for s in status.splitlines() if s.startswith("SigBlk"))
        return 0

    for _ in range(3):
        calls.share(compute, numbers(2))
        assert int(blocked[0].split()[1], 16) == 0
        cannot_be_blocked = 1 << 8 | 1 << 18  # SIGKILL, SIGSTOP
        assert int(blocked[1].split()[1], 16) & 0x7FFFFFFF == 0x7FFFFFFF & ~cannot_be_blocked


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_share_without_memory_is_an_error_and_the_others_end(failing: int) -> None:
    ended = []

    @COMPUTE
    def compute(call: int) -> int:
        ended.append(Number.from_address(call).value)
        return int(ended[-1] == failing)

    with pytest.raises(MemoryError):
        calls.share(compute, numbers(3))
    assert sorted(ended) == [0, 1, 2]


def solve(seed: int) -> Tensor:
    """Return the sum of o, dq, dk and dv for random inputs.

    The tensors are so small that torch does not use its own threads, which would hang in a forked child.
    """
    q, k, v = (normal(1, 6, 70, 64, seed=3 * seed + n).requires_grad_() for n in range(3))
    o = attention(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), o.detach())
    return o.detach() + dq + dk + dv


@pytest.fixture
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_callers_at_once_get_their_own_answers(three_threads: None) -> None:
    expected = [solve(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as callers:
        for seed, actual in enumerate(callers.map(solve, [n % 8 for n in range(160)])):
            assert torch.equal(actual, expected[seed % 8]), seed


FORKS = """
import multiprocessing
import torch
from tests.kernels.native.test_calls import solve

def child(expected):
    assert all(torch.equal(solve(1), expected) for _ in range(3))

torch.set_num_threads(3)
expected = solve(1)
for _ in range(4):
    process = multiprocessing.get_context("fork").Process(target=child, args=(expected,))
    process.start()
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    assert torch.equal(solve(1), expected)
"""


@pytest.mark.slow
def test_a_forked_child_has_threads_of_its_own() -> None:
    """A forked child computes with new threads. A new process runs FORKS, as threads of this one may hold locks."""
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr


SPAN = ("k", "v", "k_head", "v_head", "k_scale", "v_scale", "k_scale_head", "v_scale_head")


# Tensors whose name in Python is not their name in the C struct `part`: name in Python, name in C.
NAMES = {"do": "dout", "attn_mask": "mask", "dattn_mask": "dmask", "block_mask": "blocks"}


def in_c(name: str) -> str:
    """Return the member of the C struct `part` that has this name in `backward.PART`, such as `q.row` for `q_row`."""
    for member in ("_head", "_row", ""):
        base = name.removesuffix(member) if member else name
        if base != name or f"{name}_row" in backward.PART:
            return f"{NAMES.get(base, base)}.{member[1:] or 'at'}"
    return name


def places(structure: type[ctypes.Structure]) -> dict[str, int]:
    names = [field[0] for field in structure._fields_]
    return {name: getattr(structure, name).offset for name in names} | {"": ctypes.sizeof(structure)}


def integers(names: tuple[str, ...]) -> dict[str, int]:
    return {name: 8 * number for number, name in enumerate(names)} | {"": 8 * len(names)}


@pytest.mark.parametrize(
    ("header", "structures"),
    [
        (
            "forward.h",
            {
                "call": places(forward._Call), "task": integers(forward.TASK), "reader": integers(forward.READER),
                "span": integers(SPAN),
            },
        ),
        (
            "backward.h",
            {"call": places(backward._Call), "part": integers(tuple(map(in_c, backward.PART)))},
        ),
        ("threads.c", {"replay": places(calls._Replay)}),
    ],
    ids=["forward.h", "backward.h", "threads.c"],
)  # fmt: skip
def test_members_are_where_python_writes_them(
    tmp_path: Path, header: str, structures: dict[str, dict[str, int]]
) -> None:
    """Members of structs have equal offsets in Python and C. The sizes are equal too, so C has no further members."""
    expected = {(struct, name): at for struct, members in structures.items() for name, at in members.items()}
    lines = [
        f'printf("%zu ", {f"offsetof(struct {struct}, {name})" if name else f"sizeof(struct {struct})"});'
        for struct, name in expected
    ]
    source = tmp_path / "places.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#define ISA any\n"
        f'#include "{header}"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    command = build.compiler()
    assert command is not None
    program = str(tmp_path / "places")
    made = subprocess.run(
        [*command, *build.FLAGS, f"-I{build.HERE}", str(source), "-o", program, "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert dict(zip(expected, map(int, printed.split()), strict=True)) == expected


@pytest.mark.slow
def test_no_call_reads_or_writes_beyond_an_array(level: str) -> None:
    """The kernels access no memory beside their arrays: unreadable pages around each array would end the process."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.guarded", level],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 300


@pytest.mark.slow
def test_a_read_beyond_an_array_ends_the_process() -> None:
    code = (
        "import ctypes, torch; from tests.support.kernels.guarded import guarded\n"
        "t = guarded(torch.ones(8), True); print(ctypes.string_at(t.data_ptr(), 32) != b'', flush=True)\n"
        "ctypes.string_at(t.data_ptr() + 32, 1)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (-signal.SIGSEGV, "True\n"), ran.stderr
