"""The Makefile lists its targets in groups, lints with every tool, and says where a server listens."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"
GROUPS = ["use", "test", "release", "GPU"]
TOOLS = ("ruff", "mypy", "lint-imports", "codespell", "python")


def made(*arguments, folder=MAKEFILE.parent):
    return subprocess.run(["make", "--no-print-directory", *arguments], cwd=folder, capture_output=True, text=True)


def listed(target):
    """Return the groups and the targets that `make help` or `make help-all` lists."""
    text = made(target).stdout
    return re.findall(r"^(\w+):$", text, re.MULTILINE), re.findall(r"^  ([a-z-]+) ", text, re.MULTILINE)


def test_help_lists_about_ten_targets_in_groups_and_help_all_the_rest():
    groups, short = listed("help")
    assert groups == GROUPS
    assert 8 <= len(short) <= 12
    assert {"serve", "test", "lint", "dist", "gpu"} <= set(short)
    groups, every = listed("help-all")
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE.read_text(), re.MULTILINE)[1].split()
    assert groups == GROUPS
    assert sorted([*every, "help", "help-all", "protos"]) == sorted(phony)


def test_serve_prints_the_line_that_names_its_port_to_programs():
    assert "export FLASHPOINT_URL=http://localhost:9000\n" in made("-n", "serve", "PORT=9000").stdout.replace("'", "")


@pytest.fixture
def clone(tmp_path):
    """Return a repository with this Makefile, and tools that print their arguments; those in `failing` end with 1."""

    def make(*failing):
        shutil.copy(MAKEFILE, tmp_path)
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        (tmp_path / ".gitignore").write_text(".venv\nloadtests/out/\n")
        tools = tmp_path / ".venv" / "bin"
        tools.mkdir(parents=True)
        for name in TOOLS:
            (tools / name).write_text(f'#!/bin/sh\necho "ran {name} $@"\nexit {int(name in failing)}\n')
            (tools / name).chmod(0o755)
        (tmp_path / "hatch_build.py").touch()
        (tmp_path / "kernels/flashpoint_kernels/native").mkdir(parents=True)
        (tmp_path / "kernels/flashpoint_kernels/native/build.py").touch()
        for name in ("pyproject.toml", "constraints.txt", ".venv/.server", ".venv/.dev"):
            (tmp_path / name).touch()
        (tmp_path / "loadtests/out").mkdir(parents=True)
        (tmp_path / "loadtests/out/report.html").write_text("page")
        (tmp_path / "new.md").write_text("the")
        return tmp_path

    return make


def test_lint_runs_every_tool_and_names_those_that_found_something(clone):
    done = made("lint", folder=clone("ruff", "codespell"))
    assert done.returncode == 2
    for name in TOOLS:
        assert f"ran {name}" in done.stdout
    report = done.stderr.partition("these found something:\n")[2]
    assert re.findall(r"^  (?:\.venv/bin/)?(\S+)", report, re.MULTILINE) == ["ruff", "ruff", "spelling"]


def test_lint_reads_new_files_and_none_that_git_ignores(clone):
    done = made("lint", folder=clone())
    assert done.returncode == 0, done.stderr
    (spelling,) = re.findall(r"^ran codespell (.*)$", done.stdout, re.MULTILINE)
    assert "./new.md" in spelling.split()
    assert "out" not in spelling
