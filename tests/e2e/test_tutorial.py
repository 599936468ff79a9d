"""The tutorials print the output that they show, if a reader runs block after block, all Python in one session."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import BLOCK, same

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("tutorial", "train-a-layer", "judge-my-kernel", "decoding")
FILE = re.compile(rf'^```python title="([\w.]+)"\n{BLOCK}```$', re.MULTILINE)
STEP = re.compile(rf"^```(sh|python)\n{BLOCK}```\n\n```(text|json)\n{BLOCK}```$", re.MULTILINE)


def steps_of(page):
    """Return (position, language, code, kind of output, output) of each block of a page, in order.

    For a block that the page says to save as a file, language is "file", and output is the file's name.
    """
    text = (DOCS / f"{page}.md").read_text()
    files = [(match.start(), "file", match[2], "", match[1]) for match in FILE.finditer(text)]
    return sorted([*files, *((match.start(), *match.groups()) for match in STEP.finditer(text))])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_its_output_and_python_is_valid(page):
    blocks = re.findall(r"^```(?:sh|python)\b", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    assert len(steps_of(page)) == len(blocks) > 4
    for _, language, code, kind, output in steps_of(page):
        if language != "sh":
            compile(code, page, "exec")
        if kind == "json":
            json.loads(output)


@pytest.fixture(scope="module")
def readers(start_server):
    """Start a server for the tutorials alone, because their code leaves caches and jobs on it."""
    return start_server()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_step_prints_what_the_page_says(readers, page, tmp_path, monkeypatch):
    server = readers
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLASHPOINT_URL", server.url)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    session = {}
    for _, language, code, kind, output in steps_of(page):
        if language == "file":
            (tmp_path / output).write_text(code)
            continue
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, session)
            printed_text = printed.getvalue()
        else:
            ran = subprocess.run(["bash", "-e"], input=code, capture_output=True, text=True, timeout=600, check=False)
            assert ran.returncode == 0, ran.stderr
            printed_text = ran.stdout
        if kind == "json":
            assert same(json.loads(printed_text), json.loads(output)), code
        else:
            assert printed_text == output, code


MISTAKES = """\
client.attention(q, k, v, casual=True)
client.attention(q, k, v, layout="hsbd")
client.attention_grad(q, q, k, v, return_lse=True)
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
def test_strictly_typed_users_see_no_error_but_their_own(tmp_path):
    """`mypy --strict` finds an error in each line of MISTAKES, and none in the tutorial's Python or in LIBRARY.

    mypy skips torch's types, on which it would spend most of its time.
    """
    code = "".join(code for _, language, code, _, _ in steps_of("tutorial") if language == "python")
    (tmp_path / "program.py").write_text(code + MISTAKES)
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "program.py", "library.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    first = code.count("\n") + 1
    expected = [("program.py", first + number) for number in range(MISTAKES.count("\n"))]
    errors = re.findall(r"^(.+?):(\d+): error", ran.stdout, re.MULTILINE)
    assert sorted({(file, int(line)) for file, line in errors}) == expected, (
        ran.stdout + ran.stderr
    )  # compared as sets, because a line may have two errors
