"""The table of classes in docs/architecture.md has every class that a warm call makes or passes on, and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def test_the_page_lists_each_class_of_a_warm_call(tmp_path: Path) -> None:
    """If this fails, run `python benchmarks/request_path.py`, then `python docs/make_tables.py`."""
    pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
    command = [sys.executable, ROOT / "benchmarks" / "request_path.py", "--classes", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("request-path-*.json")
    made = {(row["name"], row["module"]) for row in json.loads(path.read_text())["rows"] if row["life"] != "process"}
    (block,) = re.findall(r"<!-- table: call-classes -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+)\.py` ", block, re.MULTILINE)
    assert {(name, "flashpoint_server." + file.replace("/", ".")) for name, file in rows} == made
