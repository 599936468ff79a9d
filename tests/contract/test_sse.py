"""Events are read from a stream however it is cut and whichever ends its lines have; wrong streams are refused."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashpoint_contract import sse

LINES = {": the server is there": None, "id: 1": None, "retry: 3": None, "event: row": None, "": None, "data": "",
         "data: {": "{", "data:  \u00e9}": " \u00e9}", "data:x:y": "x:y"}  # fmt: skip
ENDS = ("\n", "\r\n", "\r")


@given(
    st.lists(st.tuples(st.sampled_from(list(LINES)), st.sampled_from(ENDS)), max_size=20), st.integers(1, 9), st.data()
)
def test_events_are_the_same_however_lines_end_and_bytes_are_cut(lines, longest, data):
    # a "\r" and the "\n" of an empty line would be one end
    assume(not any(end == "\r" and following == ("", "\n") for (_, end), following in itertools.pairwise(lines)))
    events, values = [], []
    for line, _ in lines:
        values += [] if LINES[line] is None else [LINES[line]]
        if not line:
            events += ["\n".join(values)] if values else []
            values = []
    stream = "".join(line + end for line, end in lines).encode()
    frames, found = sse.Frames(), []
    while stream:
        size = data.draw(st.integers(1, longest))
        found += frames.feed(stream[:size])
        stream = stream[size:]
    assert found == events


def test_an_event_without_end_is_refused():
    frames, line = sse.Frames(), b"data: " + b"x" * 65530 + b"\n"
    for _ in range(16):
        assert frames.feed(line) == []
    for reader, last in ((frames, line), (sse.Frames(), b"x" * (1 << 20) + b"y")):
        with pytest.raises(ValueError, match="over 1048576 bytes"):
            reader.feed(last)


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(ValueError, match="utf-8"):
        sse.Frames().feed(b"data: \xff\n")
