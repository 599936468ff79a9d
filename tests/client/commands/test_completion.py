"""Shell completion works when requested as shells do: by environment variables, without arguments."""

import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

from flashpoint.commands import completion
from tests.support.forks import BESIDE_JAX

pytestmark = BESIDE_JAX

TYPED = [
    ("ver", "verify"),
    ("verify --q-l", "--q-len"),
    ("verify --dtype bf", "bfloat16"),
    ("verify --backend ti", "tiled"),
    ("verify --grads dq,dk,dat", "dq,dk,dattn_mask"),
    ("verify --extras kv", "kv_lengths"),
    ("benchmark --dtype float32,bf", "float32,bfloat16"),
    ("benchmark --direction forward,ba", "forward,backward"),
    ("benchmark --preset pa", "papers"),
    ("capacity --side ", "backward"),
    ("serve --log-format c", "console"),
    ("serve --device ", "cuda"),
]
TYPED_OF_KERNELS = [
    ("benchmark --backend naive,sdpa_fl", "naive,sdpa_flash"),
    ("reproduce --only table,pre", "table,precision"),
]


@pytest.mark.parametrize(("typed", "offered"), TYPED + TYPED_OF_KERNELS)
def test_bash_zsh_and_fish_get_commands_options_and_values(run, monkeypatch, typed, offered):
    if (typed, offered) in TYPED_OF_KERNELS:
        pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    line = f"flashpoint {typed}"
    for name, value in {
        "COMP_WORDS": line.replace(" ", "\n"), "COMP_CWORD": str(line.count(" ")), "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv(completion.VARIABLE, f"complete_{shell}")
        code, out, err = run()
        assert (code, err) == (0, "")
        assert offered in out.replace('"', " ").replace("\t", " ").split(), shell


@pytest.mark.parametrize(
    ("words", "at", "joined"),
    [
        (["flashpoint", "verify", "--dtype", "=", "bf"], 4, (["flashpoint", "verify", "--dtype=bf"], 2)),
        (["flashpoint", "verify", "--dtype", "="], 3, (["flashpoint", "verify", "--dtype="], 2)),
        (
            ["flashpoint", "info", "--url", "http", ":", "//localhost", ":", "80", "--ti"],
            8,
            (["flashpoint", "info", "--url", "http://localhost:80", "--ti"], 4),
        ),
        (["flashpoint", ""], 1, (["flashpoint", ""], 1)),
    ],
)
def test_words_that_bash_splits_are_joined(monkeypatch, words, at, joined):
    monkeypatch.setenv(completion.VARIABLE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(at))
    completion.join_words()
    assert (os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])) == joined


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes_what_is_typed(tmp_path):
    """An interactive bash that has run the script of `--show-completion` completes words after a tab."""
    folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    environment["HOME"] = str(tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    try:
        type_into(terminal, 'eval "$(flashpoint --show-completion)"; echo rea""dy\n', "ready")
        type_into(terminal, "flashpoint ver\t", "flashpoint verify ")
        type_into(terminal, "--q-l\t", "--q-len ")
        type_into(terminal, "8 --dtype=bf\t", "--dtype=bfloat16 ")
        type_into(
            terminal, "\x15flashpoint benchmark --url http://localhost:80 --direction forward,ba\t", "forward,backward "
        )
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def type_into(terminal, text, wanted):
    """Type `text` into the terminal, and wait until it shows `wanted`. Raises AssertionError after 120 s."""
    os.write(terminal, text.encode())
    seen, end = "", time.monotonic() + 120
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
