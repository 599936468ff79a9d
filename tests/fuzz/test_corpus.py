"""What the fuzzers have found, replayed, and a little of what they do: no atheris, and the same each time."""

import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import BYTES, TARGETS, bounded

CORPUS = {name: sorted((Path(__file__).parent / "corpus" / name).iterdir()) for name in TARGETS}
MOST = 300 << 10  # bytes of all of it


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_refused_or_survives_the_way_back(name):
    assert CORPUS[name]
    for path in CORPUS[name]:
        try:
            bounded(TARGETS[name], path.read_bytes())
        except Exception as error:
            raise AssertionError(path.name) from error


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for paths in CORPUS.values() for path in paths]
    assert sum(sizes) < MOST


@st.composite
def near(draw, paths):
    """An input of the corpus with a few things changed: as JSON, or as bytes."""
    data = bytearray(draw(st.sampled_from(paths)).read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            data = bytearray(mutated(bytes(data), Random(draw(st.integers(0, 1 << 30)))) or data)
        elif data:
            at = draw(st.integers(0, len(data) - 1))
            data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_near_the_corpus_is_refused_or_survives_the_way_back(name):
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a machine that does other things, too
    @given(near(CORPUS[name]))
    def check(data):
        bounded(TARGETS[name], data)

    check()


def test_a_target_that_takes_too_long_or_too_much_is_seen():
    def hoard(data):
        bytes(2 * BYTES)

    def loiter(data):
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass

    for target, said in ((hoard, "bytes of memory"), (loiter, " s for")):
        with pytest.raises(AssertionError, match=said):
            bounded(target, b"", most=0.1)
