"""The examples of the README and of docs/ run as printed, and print the output shown below them.

An example is a fenced block of sh (with curl) or python, directly followed by a block of text or json with its output.
Python examples of several pages run in one process, each in a separate namespace.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import BLOCK, same

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ("README.md", "docs/http.md", "docs/oip.md", "docs/sdk.md", "docs/sharded.md")  # run in a few seconds together
# Each example of these pages takes seconds: it imports torch or jax, compiles or computes.
OF_TORCH = ("docs/kernels.md", "docs/timing.md", "docs/torch.md", "docs/huggingface.md", "docs/coming-from.md")
OTHERS = ("docs/when-remote-attention-pays.md", "docs/jax.md")
PAGES = CLIENT + OTHERS + OF_TORCH
EXAMPLE = re.compile(rf"^```(sh|python)\n{BLOCK}```\n\n```(text|json)\n{BLOCK}```$", re.MULTILINE)
END = "<end of the example>"
RUN_EACH = f"import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path); print({END!r}, flush=True)"


def examples(page, language):
    """Return (code, kind of output, output) for each example of a page."""
    blocks = EXAMPLE.findall((ROOT / page).read_text())
    # The gRPC example needs another port: tests/server/oip/grpc/test_infer.py runs it.
    here = [each for each in blocks if "tritonclient.grpc" not in each[1]]
    return [(code, kind, output) for lang, code, kind, output in here if lang == language]


def at(server):
    """Return the environment of a program whose server is at another address than the default."""
    return {**os.environ, "FLASHPOINT_URL": server.url}


SHELL = [(page, number) for page in PAGES for number in range(len(examples(page, "sh")))]
PYTHON = [
    pytest.param(CLIENT, id="client"),
    pytest.param(OF_TORCH, id="torch", marks=pytest.mark.slow),
    *(pytest.param((page,), id=page, marks=pytest.mark.slow) for page in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), SHELL)
def test_a_shell_example_prints_what_the_page_says(server, page, number):
    code, kind, output = examples(page, "sh")[number]
    ran = subprocess.run(
        ["bash", "-e"], input=code, env=at(server), capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    if kind == "json":
        assert same(json.loads(ran.stdout), json.loads(output)), ran.stdout
    else:
        assert ran.stdout == output


@pytest.mark.parametrize("pages", PYTHON)
def test_the_python_examples_print_what_the_page_says(server, pages, tmp_path):
    blocks = [example for page in pages for example in examples(page, "python")]
    for number, (code, _, _) in enumerate(blocks):
        (tmp_path / f"{number}.py").write_text(code)
    paths = [str(tmp_path / f"{number}.py") for number in range(len(blocks))]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_EACH, *paths],
        env=at(server),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split(END + "\n") == [*(output for _, _, output in blocks), ""]


ADDRESS = "localhost:8000"
# These name the port that the page's own command has published or forwarded, or describe another program.
FIXED = {"docs/install.md", "docs/kubernetes.md", "docs/scaling.md", "docs/when-remote-attention-pays.md"}
READS = ("${FLASHPOINT_URL:-localhost:8000}", 'os.environ.get("FLASHPOINT_URL", "http://localhost:8000")')
PAGES_WITH_CODE = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", [page for page in PAGES_WITH_CODE if page not in FIXED])
def test_every_example_reads_the_address_from_flashpoint_url(page):
    for code in re.findall(r"^```(?:sh|python).*\n((?:.*\n)*?)```$", (ROOT / page).read_text(), re.MULTILINE):
        for reads in READS:
            code = code.replace(reads, "")
        commands = [
            line for line in code.splitlines() if not line.startswith("make serve")
        ]  # its comment names the port
        assert ADDRESS not in "\n".join(commands), code


def test_every_program_of_examples_reads_the_address_from_flashpoint_url():
    for path in sorted((ROOT / "examples").rglob("*.*")):
        text = path.read_text() if path.suffix in (".py", ".sh", ".mjs", ".go", ".ipynb") else ""
        assert "localhost:8000" not in text or "FLASHPOINT_URL" in text, path


def test_the_readme_has_its_examples():
    """The expected number of examples is found: one with a misspelt fence would not be found, and so not run."""
    assert len(examples("README.md", "sh")) == 1
    assert len(examples("README.md", "python")) == 3


def prose(page):
    """Return the text of a page without its code, whose calls may look like links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_every_link_between_the_pages_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", prose(page))]
    assert links
    missing = [(page.name, link) for page, link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_file_that_a_page_names_exists():
    """Pages name files by the end of their paths. NAME is a placeholder, and two files belong to other projects."""
    others = {"mykernels.py", "python/tutorials/06-fused-attention.py"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`([\w/.-]+\.(?:py|c|h))`", page.read_text())}
    assert len(named) > 100
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [path.as_posix() for path in (*ROOT.glob("*.py"), *(each for top in folders for each in top.rglob("*.*")))]
    missing = {name for _, name in named if not any(path.endswith(f"/{name}") for path in files)}
    assert {name for name in missing if "NAME" not in name} == others
