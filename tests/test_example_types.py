"""mypy and pyright find no error in the Python examples of the README and of docs/.

Each example has the same line numbers in its file as on its page. The blocks of a page in ONE_SESSION form one file,
because a reader runs them in one session. Every other block is a separate file.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import BLOCK

pytestmark = pytest.mark.full  # `make lint` also runs it
pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / name) for name in ("contract", "client", "kernels", "server")]
ONE_SESSION = {"tutorial", "train-a-layer", "judge-my-kernel", "decoding", "algorithm"}
PYTHON = re.compile(rf'^```python(?: title="([\w.]+)")?\n{BLOCK}```$', re.MULTILINE)
# For each page, code that defines the names that its examples use but do not define.
GIVEN = {"balancers": "import flashpoint; there = flashpoint.Client(); old = there.cache()"}
# Lines with type errors that other packages cause: `grad` of torch and outputs of tritonclient have types that include
# None, transformers uses a protocol, Triton's launches take numbers for constexpr, and the module `flash_attn` exists
# only after the example has called `install`.
THEIRS = re.compile(r"\.grad\.|\.as_numpy\(|get_response\(|\.generate\b|^from flash_attn\b|\[grid\]\(")
MYPY = """\
[mypy]
check_untyped_defs = true
mypy_path = {path}
[mypy-triton.*,tritonclient.*,ml_dtypes.*,transformers.*]
ignore_missing_imports = true
follow_imports = silent
"""


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Return a folder with the Python examples of the README and of docs/, as files."""
    folder = tmp_path_factory.mktemp("examples")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        lines, text = [], page.read_text(encoding="utf-8")
        for match in PYTHON.finditer(text):
            name, code = match.groups()
            line = text.count("\n", 0, match.start()) + 1  # the line of ```python; the code begins on the next line
            if name:
                (folder / name).write_text(code)
            elif page.stem in ONE_SESSION:
                lines += [""] * (line - len(lines)) + code.splitlines()
            else:
                given = GIVEN.get(page.stem, "")
                (folder / f"{page.stem.replace('-', '_')}_{line}.py").write_text(given + "\n" * line + code)
        if lines:
            (folder / f"{page.stem.replace('-', '_')}.py").write_text("\n".join(lines) + "\n")
    assert len(list(folder.iterdir())) > 30
    return folder


def checked(command, folder):
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def ours(folder, errors):
    """Return the errors (file, line, message) whose source line does not match THEIRS."""
    return [
        (file, line, message)
        for file, line, message in errors
        if not THEIRS.search((folder / file).read_text().splitlines()[line - 1])
    ]


def test_mypy_finds_no_error_in_the_examples(examples, tmp_path):
    (tmp_path / "mypy.ini").write_text(MYPY.format(path=":".join(SOURCES)))
    files = sorted(path.name for path in examples.iterdir())
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path, *files]
    output = checked(command, examples)
    errors = re.findall(r"^(.+?):(\d+): error: (.*)$", output, re.MULTILINE)
    assert "source files" in output or "source file" in output
    assert not ours(examples, [(file, int(line), message) for file, line, message in errors])


def test_pyright_finds_no_error_in_the_examples(examples, tmp_path):
    pytest.importorskip("basedpyright", reason="make test installs it")
    settings = {
        "include": [str(examples)],
        "extraPaths": [str(examples), *SOURCES],
        "typeCheckingMode": "standard",
        "reportMissingModuleSource": False,
        "reportPossiblyUnboundVariable": False,  # later blocks of a page use names assigned in a `with` or a loop
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", tmp_path, "--pythonpath", sys.executable, "--outputjson"]
    report = json.loads(checked(command, examples))
    assert report["summary"]["filesAnalyzed"] > 30
    errors = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert not ours(examples, errors)
