"""nano.py, the smallest kernel, passes the accuracy checks of the other kernels, and compiles for absent GPUs."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashpoint_kernels import Options, attention, verify
from flashpoint_kernels.nano import nano_attention, nano_forward, tile_rows
from flashpoint_kernels.triton_backend.host.config import padded
from flashpoint_kernels.triton_backend.host.configurations import SHARED_KIB
from tests.support.kernels.solving import normal, qkv

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_it_is_at_most_thirty_lines() -> None:
    assert len(inspect.getsource(nano_forward.fn).splitlines()) <= 30


SHAPES = ((1, 1, 16), (3, 3, 1), (113, 203, 59), (130, 130, 64), (17, 5, 256))  # (Sq, Sk, D)
FEW = [  # the fast tests run each shape and dtype, with and without the causal mask
    ((1, 1, 16), False, torch.float32), ((3, 3, 1), True, torch.float16), ((17, 5, 256), True, torch.float32),
    ((113, 203, 59), True, torch.bfloat16), ((130, 130, 64), False, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "causal", "dtype"),
    [
        pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow)
        for case in itertools.product(SHAPES, (False, True), DTYPES)
    ],
)
def test_against_float64_by_the_rule_of_all_kernels(
    shape: tuple[int, int, int], causal: bool, dtype: torch.dtype
) -> None:
    q_len, kv_len, dim = shape
    t = {name: x for name, x in qkv(1, 2, q_len, kv_len, dim, dtype=dtype).items() if name != "do"}
    o, lse = nano_attention(**t, causal=causal)
    report = verify(t, Options(causal=causal), answers={"o": o, "lse": lse})
    assert report.ok, report


def test_a_query_that_sees_no_key_is_zero() -> None:
    q, k = normal(2, 5, 16), normal(2, 3, 16)
    o, lse = nano_attention(q, k, k, causal=True)
    expected = attention(q, k, k, causal=True, return_lse=True, backend="reference")
    assert torch.equal(lse.isneginf(), expected[1].isneginf())
    assert lse[:, :2].isneginf().all()
    assert not o[:, :2].any()
    o, lse = nano_attention(q, k[:, :0], k[:, :0])
    assert not o.any()
    assert lse.isneginf().all()


def test_strided_inputs_and_no_queries() -> None:
    x = normal(2, 9, 3, 16)
    q, k, v = (t.transpose(0, 1) for t in x.unbind(2))
    o, _ = nano_attention(q, k, v)
    torch.testing.assert_close(o, attention(q[None], k[None], v[None])[0], rtol=1e-5, atol=1e-6)
    assert nano_attention(q[:, :0], k, v)[0].shape == (9, 0, 16)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (normal(2, 4, 16), normal(2, 5, 16), "must be"),
        (normal(3, 4, 16), normal(3, 4, 16), "must be"),
        (normal(2, 4, 8), normal(2, 4, 8), "must be"),
        (normal(2, 4, 16), normal(2, 4, 16).double(), "float64"),
    ],
)
def test_what_it_cannot_do_is_refused(k: torch.Tensor, v: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nano_attention(normal(2, 4, 16), k, v)


def test_a_tile_uses_the_shared_memory_that_there_is() -> None:
    for shared_kib, head_dim, itemsize in itertools.product(
        range(16, 513), (1, 16, 40, 64, 100, 128, 129, 256), (2, 4)
    ):
        rows = tile_rows(shared_kib, head_dim, itemsize)
        tile = rows * padded(head_dim) * itemsize
        assert rows in (16, 32, 64, 128)
        assert rows == 16 or 8 * tile <= shared_kib * 1024
        assert rows == 128 or 16 * tile > shared_kib * 1024


@pytest.mark.slow
def test_compiled_for_two_generations() -> None:
    """nano.py, compiled for sm_80 and sm_90, fits shared memory and registers, and its products use tensor cores."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernels.nano_compiled"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=3600, check=True)
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert {report["arch"] for report in reports} == {80, 90}
    for report in reports:
        assert report["shared_bytes"] <= SHARED_KIB[report["arch"]] * 1024, report
        assert report["registers"] <= 255, report
        if report["dtype"] != "float32":  # IEEE float32 has no matrix instruction
            assert report["matrix"] == [{80: "mma.sync", 90: "wgmma.mma_async"}[report["arch"]]], report


@pytest.mark.slow  # the interpreter takes several seconds
def test_it_shows_itself_and_its_errors_from_the_command_line() -> None:
    """`python -m flashpoint_kernels.nano` prints the kernel and its errors, also if TRITON_INTERPRET is not set."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "flashpoint_kernels.nano"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600, check=True)
    lines = run.stdout.splitlines()
    line_count = next(int(line.split()[0]) for line in lines if line.endswith(" lines."))
    assert line_count == len(inspect.getsource(nano_forward.fn).splitlines()) == lines.index("")
    assert lines[0] == "@triton.jit"
    assert not re.search("noqa|fmt:", run.stdout)
    shown = "\n".join(lines[: lines.index("")])
    assert f"``` python\n{shown}\n```" in (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text()
    assert any(line.split() == ["sm_90", "227", "KiB", "128", "64", "64"] for line in lines), run.stdout
    errors = [line for line in lines if "float32 " in line and " o " in line]
    assert len(errors) == 2
    assert all(float(line.split()[-3]) <= float(line.split()[-1]) for line in errors)
