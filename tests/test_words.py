"""tests/words.py, which `make lint` runs, finds each sentence that breaks a rule of wording, and no others."""

import pytest

from tests.words import violations

WRONG = [
    '"""What it holds."""',
    "# It runs. Of these, some fail.",
    "| Who asks | an error |",
    "a sentence.\n# That\n# which follows",
    "a key of one's own",
    "for whoever reads it, such\n    # as would fail",
]
RIGHT = [
    "## What does a cache hold?",
    "It says what it holds, of which some is free.",
    "Write `Of these` or `one's` nowhere.",
    'Do not open a sentence with "Of", "What" or "Who".',
    "What = Literal['requests', 'bytes']",
    "rates: dict[What, float]",
]


@pytest.mark.parametrize("text", WRONG)
def test_a_sentence_against_the_rules_is_found(text):
    assert list(violations(text, markdown=True))


@pytest.mark.parametrize("text", RIGHT)
def test_a_sentence_by_the_rules_is_not(text):
    assert list(violations(text, markdown=True)) == []


def test_the_line_is_named():
    assert list(violations("one\n\nWhat two\n", markdown=False)) == [(3, "What two")]
