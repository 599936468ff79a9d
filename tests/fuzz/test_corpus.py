"""The fuzz targets run on the corpus and on inputs near it, without atheris. Each run has the same inputs."""

import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import targets
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import BYTES, SECONDS, TARGETS, bounded

CORPUS = {name: sorted((Path(__file__).parent / "corpus" / name).iterdir()) for name in TARGETS}
MAX_BYTES = 300 << 10  # allowed size of the whole corpus, in bytes
TIMELESS = math.inf  # seconds; these tests set no time limit, because a busy machine would exceed any limit


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_refused_or_survives_the_way_back(name):
    assert CORPUS[name]
    TARGETS[name](CORPUS[name][0].read_bytes())  # fills caches, whose memory must not count against the limit
    for path in CORPUS[name]:
        try:
            bounded(TARGETS[name], path.read_bytes(), TIMELESS)
        except Exception as error:
            raise AssertionError(path.name) from error


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for paths in CORPUS.values() for path in paths]
    assert sum(sizes) < MAX_BYTES


@st.composite
def near(draw, paths):
    """Draw an input of the corpus with one to four changes, each of a JSON value or of bytes."""
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
    # No time limits: the machine may be busy.
    @settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(near(CORPUS[name]))
    def check(data):
        bounded(TARGETS[name], data, TIMELESS)

    TARGETS[name](CORPUS[name][0].read_bytes())
    check()


def test_a_target_that_takes_too_much_memory_is_seen():
    def hoard(data):
        bytes(2 * BYTES)

    with pytest.raises(AssertionError, match="bytes of memory"):
        bounded(hoard, b"", TIMELESS)


def test_a_target_that_takes_too_long_is_seen(monkeypatch):
    class Clock:
        seconds = 0.0

        def thread_time(self):
            return self.seconds

    clock = Clock()

    def take(seconds):
        clock.seconds += seconds

    monkeypatch.setattr(targets, "time", clock)
    bounded(lambda data: take(SECONDS - 0.5), b"")
    with pytest.raises(AssertionError, match=" s for"):
        bounded(lambda data: take(SECONDS + 0.5), b"")
