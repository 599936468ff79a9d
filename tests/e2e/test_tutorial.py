"""docs/tutorial.md as a reader follows it: block after block, the Python in one session, each with its output."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import BLOCK, same

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
STEP = re.compile(rf"^```(sh|python)\n{BLOCK}```\n\n```(text|json)\n{BLOCK}```$", re.MULTILINE)


@pytest.fixture(scope="module")
def steps():
    """(language, code, kind of output, output) of each block."""
    return STEP.findall(PAGE.read_text())


def test_every_block_has_its_output_and_python_is_valid(steps):
    blocks = re.findall(r"^```(?:sh|python)$", PAGE.read_text(), re.MULTILINE)
    assert len(steps) == len(blocks) > 5
    for language, code, kind, output in steps:
        if language == "python":
            compile(code, PAGE.name, "exec")
        if kind == "json":
            json.loads(output)


@pytest.mark.slow
def test_every_step_prints_what_the_page_says(start_server, steps):
    server = start_server()  # of its own: the last step shows the counts of the others
    session = {}
    for language, code, kind, output in steps:
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code.replace("http://localhost:8000", server.url), session)
            found = printed.getvalue()
        else:
            code = code.replace("localhost:8000", f"127.0.0.1:{server.port}")
            ran = subprocess.run(["bash", "-e"], input=code, capture_output=True, text=True, timeout=600, check=False)
            assert ran.returncode == 0, ran.stderr
            found = ran.stdout
        if kind == "json":
            assert same(json.loads(found), json.loads(output)), code
        else:
            assert found == output, code


MISTAKES = """\
client.attention(q, k, v, casual=True)
client.attention(q, k, v, layout="hsbd")
client.attention_grad(do, q, k, v, return_lse=True)
client.attention(q, k, v, timeout="1s")
report.tensors[0].max_error
"""
LIBRARY = """\
import numpy as np
from numpy.typing import NDArray

import flashpoint
from flashpoint import BenchmarkJob, Meta, VerifyReport

Array = NDArray[np.float32]


class Layer:
    def __init__(self, client: flashpoint.Client, options: flashpoint.AttentionOptions) -> None:
        self.client, self.options = client, options

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Meta]:
        o: Array
        meta: Meta
        o, meta = self.client.attention(q, k, v, causal=self.options.causal, with_meta=True)
        return o, meta


async def judged(client: flashpoint.AsyncClient) -> VerifyReport:
    return await client.verify(shape=flashpoint.Shape(q_len=4, head_dim=8), dtype="float16")


def timed(client: flashpoint.Client) -> BenchmarkJob:
    run = client.benchmark(shapes=[flashpoint.Shape(q_len=4, head_dim=8)])
    for event in run.events():
        print(event.id, event.kind)
    return run.wait()
"""


@pytest.mark.slow
def test_strictly_typed_users_see_no_error_but_their_own(steps, tmp_path):
    """mypy --strict as a user runs it finds the mistakes alone: none in the page's Python, none in a library.

    Left out: the block that needs torch, and torch's own types, on which mypy would spend most of its time.
    """
    code = "".join(code for language, code, _, _ in steps if language == "python" and "import torch" not in code)
    (tmp_path / "program.py").write_text(code + MISTAKES)
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "program.py", "library.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    first = code.count("\n") + 1
    expected = [("program.py", first + number) for number in range(MISTAKES.count("\n"))]
    errors = re.findall(r"^(.+?):(\d+): error", ran.stdout, re.MULTILINE)
    assert [(file, int(line)) for file, line in errors] == expected, ran.stdout + ran.stderr
