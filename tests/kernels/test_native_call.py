"""C and Python describe a call alike: the same members, at the same offsets."""

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint_kernels.native import backward, build, calls, forward

SPAN = ("k", "v", "k_head", "v_head", "k_scale", "v_scale", "k_scale_head", "v_scale_head")
# Members of struct part in C, by their names in Python.
NAMES = {"do": "dout", "attn_mask": "mask", "dattn_mask": "dmask", "block_mask": "blocks"}


def in_c(name: str) -> str:
    """Return the member of struct part for this name in `backward.PART`."""
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
    ("header", "structure", "expected"),
    [
        ("forward.h", "call", places(forward._Call)),
        ("forward.h", "task", integers(forward.TASK)),
        ("forward.h", "reader", integers(forward.READER)),
        ("forward.h", "span", integers(SPAN)),
        ("backward.h", "call", places(backward._Call)),
        ("backward.h", "part", integers(tuple(map(in_c, backward.PART)))),
        ("threads.c", "replay", places(calls._Replay)),
    ],
)
def test_members_are_where_python_writes_them(
    tmp_path: Path, header: str, structure: str, expected: dict[str, int]
) -> None:
    """The sizes are equal, too: C has no further members."""
    lines = [
        f'printf("%zu ", {f"offsetof(struct {structure}, {name})" if name else f"sizeof(struct {structure})"});'
        for name in expected
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
    """Each array ends at an unreadable page, and in a second run begins after one."""
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
