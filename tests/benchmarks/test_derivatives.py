"""benchmarks/derivatives.py measures each derivative beside a plain call and torch's math path, after a comparison."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEASURED = {"jvp": 3, "hvp": 6, "key_weights": 3, "memory": 4, "cache": 2}
WRONG = """
import sys
sys.path.insert(0, sys.argv[1])
import derivatives
inputs, dots = derivatives.drawn(8)
plain, math = derivatives.attention, derivatives.by_math(False)
for product in derivatives.PRODUCTS.values():
    right = product(math, inputs, dots)
    derivatives.check("right", product(plain, inputs, dots), right)
    try:
        derivatives.check("wrong", [1.01 * t for t in product(plain, inputs, dots)], right)
    except AssertionError as error:
        print(str(error).startswith("wrong: "))
"""


@pytest.mark.slow
def test_each_derivative_has_its_rows_and_targets(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    sizes = ["--rounds", "1", "--length", "64", "--longest", "256"]
    command = [sys.executable, BENCHMARKS / "derivatives.py", *sizes, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (path,) = tmp_path.glob("derivatives-*.json")
    result = json.loads(path.read_text())
    assert {name: len(rows) for name, rows in result["rows"].items()} == MEASURED, done.stderr
    met = [target["met"] for target in result["targets"]]
    assert len(met) == 4
    assert done.returncode == (not all(met))
    lengths = {section: [row["length"] for row in result["rows"][section]] for section in ("jvp", "key_weights")}
    assert lengths == {section: [32, 64, 64] for section in lengths}
    for section, plain in (("jvp", "forward"), ("hvp", "gradient")):
        for row in result["rows"][section]:
            assert {plain, f"math {plain}"} < row["ms"].keys()
            assert min(row["over_plain"], row["math_over_plain"], row["times"], *row["ms"].values()) > 0
    assert all(list(row["mib"]) == ["64", "128", "256"] for row in result["rows"]["memory"])


def test_a_wrong_product_is_seen() -> None:
    pytest.importorskip("psutil")
    command = [sys.executable, "-c", WRONG, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
