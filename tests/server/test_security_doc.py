"""Every test that docs/security.md and docs/reference/limits.md link to exists."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("security.md", "reference/limits.md"))
LINKS = re.findall(r"\]\((?:\.\./)+(tests/[\w/]+\.py)#(\w+)\)", TEXT)


@functools.cache
def functions(path):
    return {f.name for f in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(f, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), sorted(set(LINKS)))
def test_a_claims_test_is_there(path, name):
    assert name.startswith("test_")
    assert name in functions(path)


def test_no_claim_is_linked_in_another_way():
    assert len(LINKS) > 25
    assert TEXT.count("[test](") == len(LINKS)
