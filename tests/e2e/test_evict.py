"""examples/evict.py: a cache that drops keys with little attention answers better than one that drops the oldest."""

import json
import re
from pathlib import Path

import pytest

import flashpoint
from tests.support.programs import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    return load(ROOT / "examples" / "evict.py")


def test_key_weights_keep_what_is_asked_for(example, server):
    """The stream depends on the seed alone, and the shares are far apart: 0.97 and 0.60 of 384 answers."""
    with flashpoint.Client(server.url) as client:
        weighed, oldest = (example.right(client, 12, 48, way) for way in example.WAYS)
        assert example.right(client, 4, None, "key weights") == 1.0  # without a limit all answers are right
    assert weighed > oldest + 0.1


def test_the_page_says_what_was_measured():
    document = json.loads((ROOT / "benchmarks" / "results" / "evict.json").read_text())
    page = " ".join((ROOT / "docs" / "decoding.md").read_text().split())
    found = re.search(r"With (\d+) of 1,024 tokens, ([\d.]+)% of the answers were right, and ([\d.]+)% where", page)
    assert found is not None
    place = document["budgets"].index(int(found[1]))
    shares = [f"{100 * document['shares'][way][place]:.0f}" for way in ("key weights", "oldest dropped")]
    assert [found[2], found[3]] == shares
    assert document["whole"] == 1.0
