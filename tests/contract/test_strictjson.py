"""JSON is parsed strictly: no repeated keys, lone surrogates or bare NaN. Strings stand for NaN and infinities."""

import json
import math

import pytest

from flashpoint_contract.strictjson import WORDS, loads, written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "a key appears twice in one object"),
        ('[{"b": {"a": 1, "a": 2}}]', "a key appears twice in one object"),
        ("[NaN]", 'NaN is not JSON: write "NaN" in fields that take it'),
        ("-Infinity", '-Infinity is not JSON: write "-Infinity" in fields that take it'),
        ("[" * 100_000, "nested too deeply"),
        (b'"\xff"', "can't decode byte"),
        ('"\\ud800"', "surrogates not allowed"),
        ('{"\\uDC00": 1}', "surrogates not allowed"),
        ("[1,]", "Expecting value|trailing comma"),
        ("", "Expecting value"),
    ],
)
def test_what_is_not_strict_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        loads(text)


def test_a_whole_surrogate_pair_and_words_are_read():
    assert loads(b'{"a": "\\ud83d\\ude00", "b": [1, 2.5, null, true]}') == {"a": "😀", "b": [1, 2.5, None, True]}
    assert loads("[NaN, -Infinity]", words=True) == ["NaN", "-Infinity"]


def test_each_word_stands_for_the_number_that_is_written_as_it():
    assert {word: written(number) for word, number in WORDS.items()} == {word: word for word in WORDS}
    finite = [0.0, -0.0, 5e-324, 1.7976931348623157e308, -1]
    assert json.loads(json.dumps([written(x) for x in finite], allow_nan=False)) == finite
    assert math.isnan(WORDS["NaN"])
