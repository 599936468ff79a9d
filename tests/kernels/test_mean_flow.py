"""examples/mean_flow.py: JVPs in a training give the losses of torch's math path."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import load

ROOT = Path(__file__).parents[2]
STEPS = 4
# Torch traces its operators' tangents with torch.jit.script at the first JVP of the math path.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
BOUND = 4e-6  # of the first loss, as in tests/e2e/test_train_gpt.py


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    example: Any = load(ROOT / "examples" / "mean_flow.py")
    trained = {way: example.train(way, steps=STEPS, batch=2, points=40) for way in example.WAYS}
    assert all(len(one.sample) == 40 for one in trained.values())
    return {way: one.losses for way, one in trained.items()}


def apart(losses: dict[str, list[float]]) -> float:
    return max(abs(a - b) for a, b in zip(*losses.values(), strict=True))


def test_both_ways_have_one_curve(losses: dict[str, list[float]]) -> None:
    first = losses["math path"][0]
    assert len(set(losses["math path"])) == STEPS
    assert apart(losses) <= BOUND * first


def test_the_page_says_what_was_measured() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "mean-flow.json").read_text())
    ours, math = (document["runs"][way] for way in ("flashpoint", "math path"))
    page = " ".join((ROOT / "docs" / "derivatives.md").read_text().split())
    found = re.search(r"took (\d+) MiB of memory, and with torch's math path (\d+)", page)
    assert found is not None
    assert [int(found[1]), int(found[2])] == [round(ours["mib"]), round(math["mib"])]
    seconds = re.search(r"They took (\d+) and (\d+) s of processor time", page)
    assert seconds is not None
    assert [int(n) for n in seconds.groups()] == [round(ours["seconds"]), round(math["seconds"])]
    largest = re.search(r"losses differed by at most (\S+) in", page)
    assert largest is not None
    assert float(largest[1]) == float(f"{apart({'ours': ours['losses'], 'math': math['losses']}):.1e}")
